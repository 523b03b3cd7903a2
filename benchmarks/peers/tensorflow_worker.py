"""One task of a TensorFlow cluster: a worker of the ring, a server, or who coordinates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf  # type: ignore[import-not-found,unused-ignore]

from benchmarks.peers import common
from benchmarks.peers.training import Meter, SameBatches


def run(request: common.Request, folder: Path) -> None:
    """As TF_CONFIG says."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    facts = json.loads((folder / "facts.json").read_text())
    if request.threads:
        pin(request, int(task["index"]) if task["type"] == "worker" else 0, task["type"])
    if request.variant == "mirrored":
        mirrored(request, folder, facts, int(task["index"]))
    elif task["type"] == "chief":
        coordinate(request, folder, facts)
    else:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        settings = tf.compat.v1.ConfigProto()
        settings.intra_op_parallelism_threads = request.threads
        # As its guide says: with fewer, tasks that wait for each other never end.
        settings.inter_op_parallelism_threads = max(common.visible_cores(), facts["world"] + 1)
        tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=task["type"],
            task_index=int(task["index"]),
            protocol="grpc",
            config=settings,
        ).join()


def pin(request: common.Request, index: int, kind: str) -> None:
    """Threads of a worker, and its part of the cores; servers take what is left."""
    tf.config.threading.set_intra_op_parallelism_threads(request.threads)
    if request.variant == "mirrored":
        tf.config.threading.set_inter_op_parallelism_threads(request.threads)
    if kind == "worker":
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // request.processes)
        first = index % request.processes * each % len(cores)
        os.sched_setaffinity(0, cores[first : first + each])


def mirrored(request: common.Request, folder: Path, facts: dict[str, Any], index: int) -> None:
    """A worker of the ring: synchronous, every worker an equal part of each batch."""
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model, optimizer = build(folder, facts), optimizer_of(facts)
        optimizer.build(model.trainable_variables)

    @tf.function
    def update(inputs: Any, targets: Any) -> Any:
        def replica(inputs: Any, targets: Any) -> Any:
            return step(model, optimizer, inputs, targets, facts, 1.0 / facts["world"])

        # The loss of this worker: all are brought together at the end, not over the network.
        return strategy.run(replica, args=(inputs, targets))

    targets = np.load(folder / "targets.npy")
    batches = SameBatches(facts["samples"], facts["batch"], facts["seed"], index, facts["world"])
    meter, clock, done = Meter(), common.Clock(), 0
    for epoch in range(facts["epochs"]):
        batches.epoch = epoch
        written = folder / f"inputs-{epoch}.npy"
        if written.exists():
            inputs = np.load(written, mmap_mode="r")
        clock.start()
        for own in batches:
            loss = update(tf.constant(inputs[own]), tf.constant(targets[own]))
            clock.losses.append(float(strategy.experimental_local_results(loss)[0]))
            clock.update()
            done += 1
            if done == facts["steps"]:
                break
        clock.epoch(facts["batch"] * len(clock.updates))
        if done == facts["steps"]:
            break
    used, sent = meter.stop(first=index % request.processes == 0)
    leave(folder, index, clock, meter.seconds, used, sent)


def coordinate(request: common.Request, folder: Path, facts: dict[str, Any]) -> None:
    """Hand out steps to the workers, who send their gradients to the server when they like."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = build(folder, facts), optimizer_of(facts)
        optimizer.build(model.trainable_variables)
    own = facts["batch"] // facts["world"]

    def samples(context: Any = None) -> Any:
        return own_dataset(folder, facts, own)

    @tf.function
    def data() -> Any:
        return strategy.distribute_datasets_from_function(samples)

    iterator = iter(coordinator.create_per_worker_dataset(data))

    @tf.function
    def update(iterator: Any) -> Any:
        def replica(inputs: Any, targets: Any) -> Any:
            return step(model, optimizer, inputs, targets, facts, 1.0 / facts["world"])

        inputs, targets = next(iterator)
        return strategy.run(replica, args=(inputs, targets))

    meter, clock = Meter(), common.Clock()
    updates = facts["samples"] // facts["batch"]
    for _ in range(facts["epochs"]):
        clock.start()
        told = [
            coordinator.schedule(update, args=(iterator,)) for _ in range(updates * facts["world"])
        ]
        coordinator.join()
        clock.update()  # nobody knows when one of them was done: an epoch is what is timed
        found = [float(each.fetch()) for each in told]
        clock.losses += np.mean(np.reshape(found, (updates, facts["world"])), axis=1).tolist()
        seconds = clock.updates[0]
        clock.updates = [seconds / updates] * updates
        clock.epoch(facts["batch"] * updates)
    used, _ = meter.stop(first=True)
    leave(folder, 0, clock, meter.seconds, used, 0.0)


def own_dataset(folder: Path, facts: dict[str, Any], batch: int) -> Any:
    """The samples from files, which every worker reads by itself, over and over."""
    shape = np.load(folder / "inputs-0.npy", mmap_mode="r").shape[1:]
    record = int(np.prod(shape)) * 4
    header = os.path.getsize(folder / "inputs-0.npy") - facts["samples"] * record  # noqa: PTH202
    inputs = tf.data.FixedLengthRecordDataset(
        str(folder / "inputs-0.npy"), record, header_bytes=header
    ).map(lambda text: tf.reshape(tf.io.decode_raw(text, tf.float32), shape))
    targets = tf.data.Dataset.from_tensor_slices(np.load(folder / "targets.npy"))
    both = tf.data.Dataset.zip((inputs, targets)).cache()
    return both.shuffle(facts["samples"]).repeat().batch(batch, drop_remainder=True).prefetch(2)


def step(
    model: Any, optimizer: Any, inputs: Any, targets: Any, facts: dict[str, Any], part: float
) -> Any:
    """An update by one worker's part of a batch; gives its mean loss."""
    with tf.GradientTape() as tape:
        outputs = model(inputs, training=True)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=outputs)
        loss = tf.reduce_mean(each)
        scaled = loss * part
    variables = model.trainable_variables
    gradients = tape.gradient(scaled, variables)
    if facts["decay"]:
        pairs = zip(gradients, variables, strict=True)
        gradients = [g + facts["decay"] * part * v for g, v in pairs]
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss


def optimizer_of(facts: dict[str, Any]) -> Any:
    if facts["optimizer"] == "adam":
        return tf.keras.optimizers.Adam(learning_rate=facts["rate"], epsilon=1e-8)
    return tf.keras.optimizers.SGD(learning_rate=facts["rate"], momentum=facts["momentum"])


def build(folder: Path, facts: dict[str, Any]) -> Any:
    """The layers in Keras, with PyTorch's first weights."""
    shape = np.load(folder / "inputs-0.npy", mmap_mode="r").shape[1:]
    weights = np.load(folder / "weights.npz")
    start = tf.keras.Input(shape=shape)
    values = {"input": start}
    made = []
    for layer in facts["layers"]:
        inputs = [values[name] for name in layer["inputs"]]
        keras = [] if layer["kind"] == "add" else layers_of(layer)
        value = tf.keras.layers.Add()(inputs) if layer["kind"] == "add" else inputs[0]
        for each in keras:
            value = each(value)
        values[layer["name"]] = value
        made.append((layer, keras))
    model = tf.keras.Model(start, value)
    for layer, keras in made:
        if found := weights_of(layer, weights):
            keras[-1].set_weights(found)
    return model


def layers_of(layer: dict[str, Any]) -> list[Any]:
    """Keras layers that together do what one of PyTorch does; weights belong to the last."""
    keras = tf.keras.layers
    padding = [(side, side) for side in layer.get("padding", (0, 0))]
    padded = [keras.ZeroPadding2D(padding)] if any(side for side, _ in padding) else []
    match layer["kind"]:
        case "convolution":
            made = keras.Conv2D(
                layer["filters"], layer["size"], layer["stride"], use_bias=layer["bias"]
            )
            return [*padded, made]
        case "pool":  # behind a ReLU, where a zero at the border is never the largest alone
            return [*padded, keras.MaxPooling2D(layer["size"], layer["stride"])]
        case "average":
            return [keras.AveragePooling2D(layer["size"])]
        case "batch_norm":
            momentum = 1.0 - layer["momentum"]
            return [keras.BatchNormalization(momentum=momentum, epsilon=layer["epsilon"])]
        case "dense":
            return [keras.Dense(layer["units"], use_bias=layer["bias"])]
        case "dropout":
            return [keras.Dropout(layer["part"])]
        case "flatten":  # PyTorch's order, which the weights of the next layer are in
            return [keras.Permute((3, 1, 2)), keras.Flatten()]
        case "relu":
            return [keras.ReLU()]
    raise SystemExit(f"no layer of Keras for {layer['kind']}")


def weights_of(layer: dict[str, Any], weights: Any) -> list[np.ndarray]:
    """In Keras's shapes and order."""

    def named(*keys: str) -> list[np.ndarray]:
        return [weights[f"{layer['name']}.{key}"] for key in keys]

    biased = ("weight", "bias") if layer.get("bias") else ("weight",)
    match layer["kind"]:
        case "convolution":
            first, *rest = named(*biased)
            return [first.transpose(2, 3, 1, 0), *rest]
        case "dense":
            first, *rest = named(*biased)
            return [first.T, *rest]
        case "batch_norm":
            return named("weight", "bias", "running_mean", "running_var")
    return []


def leave(
    folder: Path, index: int, clock: common.Clock, seconds: float, used: float, sent: float
) -> None:
    """What the launcher makes one result of."""
    part = {
        "epochs": clock.epochs,
        "losses": clock.losses,
        "seconds": seconds,
        "cpu": used,
        "sent": sent,
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "version": tf.__version__,
    }
    common.write_result(folder / f"worker-{index}.json", part)
