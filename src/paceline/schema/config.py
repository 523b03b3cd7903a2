"""What a user asks for. Every field's docstring is what `paceline train --help` prints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import ConfigError, shown
from paceline.schema.codec import rule
from paceline.schema.exchanges import EXCHANGES
from paceline.schema.strategies import STRATEGIES

OPTIMIZERS = ("sgd", "adam", "adamw")
LOSSES = (
    "cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
"""Losses by their names in torch.nn.functional."""
DEFAULT_BATCH = 128
MOST_CLASSES = 2**24
"""One row of weights each: beyond that no model of this kind fits into a machine."""
MOST_SAMPLES = 2**40
"""Of one update: far above any, and still far below where sums of them overflow."""
MOST_PIXELS = 2**14
"""Height and width of an image; one in colour then takes 3 GB."""
MOST_THREADS = 4096
"""More than any machine has cores: the kernel would refuse them."""
A_WEEK = 7 * 24 * 3600.0
"""Seconds; whoever waits longer waits for nothing."""


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """What to train."""

    model: str = "mnist_cnn"
    """A model's name (`paceline models`), or your own: "module:callable" or "file.py:callable"."""
    model_options: dict[str, object] = field(default_factory=dict)
    """Options of the model, such as { dropout = 0.2 } or { stem = "small" }."""
    classes: int | None = rule(default=None, minimum=2, maximum=MOST_CLASSES)
    """How many classes the model tells apart; the data's own number when left out."""
    weights: str | None = None
    """A safetensors or torch file to start from; torchvision's parameter names fit."""
    head: Literal["keep", "replace"] = "keep"
    """With `weights`: "replace" starts with a new last layer when the classes differ."""
    freeze: bool = False
    """Train only the last layer and leave the rest of the model as it is."""
    data: str = "digits"
    """A data set's name (`paceline data`), a folder of class folders, or "module:callable"."""
    batch_size: int | None = rule(default=None, minimum=1, maximum=MOST_SAMPLES)
    """Samples per update over all machines; 128 when neither this nor batch_per_worker is given."""
    batch_per_worker: int | None = rule(default=None, minimum=1, maximum=MOST_SAMPLES)
    """Samples per update and worker (weak scaling), instead of batch_size.

    A worker is a process of `processes` or a row of `hybrid`; otherwise a machine is one.
    """
    loss: str = "cross_entropy"
    """A name of torch.nn.functional (cross_entropy, mse_loss, l1_loss, smooth_l1_loss, huber_loss,
    binary_cross_entropy_with_logits), or your own "module:callable": (outputs, targets) -> mean
    over samples."""
    step: str = ""
    """Instead of a loss, your own "module:callable": (model, batch) -> loss, or a dict with it."""
    collate_fn: str = ""
    """With `step`: your own "module:callable" that makes a batch of a list of samples."""
    metrics: dict[str, str] = field(default_factory=dict)
    """What else is reported: name -> "module:callable", (outputs, targets) -> (sum, count)."""
    unit: str = "images"
    """What rates count: samples, whatever they are called, or with "tokens" or any other name what
    the step's weight counts."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_per_worker is not None:
            raise ConfigError(
                f"workload.batch_size = {self.batch_size} and workload.batch_per_worker ="
                f" {self.batch_per_worker} exclude each other: leave one out"
            )
        if self.step and self.loss != "cross_entropy":
            raise ConfigError(
                f"workload.step = {shown(self.step)} computes the loss itself, but workload.loss ="
                f" {shown(self.loss)} is given too: leave one out"
            )
        if self.step and self.metrics:
            raise ConfigError(
                "workload.metrics are functions of (outputs, targets), which a step keeps to"
                " itself: let the step return what is to be reported, beside its loss"
            )
        if self.collate_fn and not self.step:
            raise ConfigError(
                "workload.collate_fn makes batches of any structure, which only a step takes: give"
                " workload.step, or leave it out"
            )
        if self.head == "replace" and self.weights is None:
            raise ConfigError("workload.head = 'replace' needs workload.weights to replace it in")

    @property
    def code(self) -> dict[str, str]:
        """What may be code of the user's own, by key, besides the data."""
        named = {key: getattr(self, key) for key in ("model", "loss", "step", "collate_fn")}
        named |= {f"metrics.{name}": text for name, text in self.metrics.items()}
        return {f"workload.{key}": text for key, text in named.items() if text}

    def global_batch(self, workers: int) -> int:
        """Samples per update over all workers."""
        if self.batch_per_worker is not None:
            return self.batch_per_worker * workers
        return self.batch_size or DEFAULT_BATCH


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the data lies and how it is read."""

    root: str | None = None
    """Folder that holds the data sets; PACELINE_DATA when left out."""
    image_size: int | None = rule(default=None, minimum=8, maximum=MOST_PIXELS)
    """Height and width that images are scaled to; the model's own when left out."""
    limit: int | None = rule(default=None, minimum=1)
    """Use only this many samples of each split."""
    validation: float = rule(default=0.2, minimum=0.0, maximum=0.9)
    """Part of the data that is kept for testing where the data set has no split of its own."""
    augment: bool = True
    """Random horizontal flips for photographs in training."""
    shuffle: bool = True
    """A new order of the samples in every epoch; false takes them as they are numbered."""
    cache: str | None = None
    """Folder for decoded images; the user's cache folder when left out."""
    workers: int | None = rule(default=None, minimum=1, maximum=MOST_THREADS)
    """Threads that read and decode; as many as there are cores when left out."""
    processes: int = rule(default=0, minimum=0, maximum=MOST_THREADS)
    """Processes that fetch samples of a dataset of your own, as a DataLoader's num_workers; 0: none
    but those that train."""
    options: dict[str, object] = field(default_factory=dict)
    """Options of the data set, such as { shape = [3, 32, 32] } for synthetic."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How weights follow gradients."""

    name: str = "adam"
    """sgd, adam, adamw, or your own "module:callable": (parameters, learning_rate) -> optimizer."""
    learning_rate: float = rule(default=0.001, minimum=0.0)
    """Rate at the reference batch."""
    reference_batch: int | None = rule(default=None, minimum=1)
    """The rate grows in proportion to batch / reference_batch; no scaling when left out."""
    scaling: Literal["linear", "sqrt"] = "linear"
    """How the rate grows with the batch when reference_batch is given."""
    momentum: float = rule(default=0.0, minimum=0.0, maximum=1.0)
    """Momentum of sgd."""
    nesterov: bool = False
    """Nesterov momentum for sgd."""
    weight_decay: float = rule(default=0.0, minimum=0.0)
    """Weight decay."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """How the rate falls after the warm-up."""
    warmup: float = rule(default=0.0, minimum=0.0, maximum=1.0)
    """Part of all updates over which the rate rises from near zero."""
    step_every: float = rule(default=0.3, minimum=0.001, maximum=1.0)
    """With schedule = "step": part of all updates between two falls."""
    step_factor: float = rule(default=0.1, minimum=0.0, maximum=1.0)
    """With schedule = "step": what the rate is multiplied with at each fall."""
    clip_norm: float | None = rule(default=None, minimum=0.0)
    """Largest norm of the whole gradient; longer ones are shortened to it."""
    scheduler: str = ""
    """Instead of a schedule: "module:callable", optimizer -> one of torch.optim.lr_scheduler."""
    scheduler_steps: Literal["epoch", "update"] = "epoch"
    """After what the scheduler takes its steps."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.learning_rate) or self.learning_rate <= 0:
            raise ConfigError(
                f"optimizer.learning_rate = {self.learning_rate} must be a finite number above 0"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"optimizer.clip_norm = {self.clip_norm} must be above 0")
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ConfigError(
                f"optimizer.momentum and nesterov belong to sgd, not to {shown(self.name)}:"
                " leave them out"
            )
        if self.scheduler and (self.schedule != "constant" or self.warmup):
            raise ConfigError(
                f"optimizer.scheduler = {shown(self.scheduler)} and optimizer.schedule or warmup"
                " both say how the learning rate moves: leave one of them out"
            )
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov = true needs optimizer.momentum above 0")


@dataclass(frozen=True, kw_only=True)
class Until:
    """When to stop before the last epoch."""

    accuracy: float | None = rule(default=None, minimum=0.0, maximum=1.0)
    """Stop when the test accuracy reaches this (0 to 1)."""
    loss: float | None = None
    """Stop when the test loss is at most this."""
    value: float | None = None
    """Stop when what train.monitor names is as good as this."""
    patience: int | None = rule(default=None, minimum=1)
    """Stop after this many evaluations without a better test accuracy (loss, without classes)."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, on what, and how often it is saved."""

    epochs: int = rule(default=5, minimum=1)
    """Passes over the training data."""
    steps: int | None = rule(default=None, minimum=1)
    """Stop after this many updates, whatever `epochs` says."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Written by --resume for longer: before that update, rates count out of that many."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes CUDA where there is one, else the CPU."""
    until: Until = field(default_factory=Until)
    """When to stop early."""
    monitor: str = "auto"
    """What makes an evaluation the best, as "loss:min" or "mae:min"; "auto" takes test accuracy, or
    without classes test loss."""
    evaluate_every: int = rule(default=1, minimum=1)
    """Epochs between two evaluations; the last epoch is always evaluated."""
    checkpoint_every: int | None = rule(default=None, minimum=1)
    """Updates between two checkpoints; one is always written at the end of an epoch."""
    checkpoint_seconds: float = rule(default=60.0, minimum=1.0, maximum=A_WEEK)
    """Over several nodes, seconds after which one is written besides: what a loss can cost."""
    keep: int = rule(default=2, minimum=1)
    """How many of the newest checkpoints are kept, besides the best one."""
    deterministic: bool = True
    """Use only operations that give the same result every time."""
    deadline: float = rule(default=60.0, minimum=1.0, maximum=A_WEEK)
    """Seconds that ranks wait for a rank that does not arrive before the run is ended."""
    silence: float = rule(default=10.0, minimum=2.0, maximum=A_WEEK)
    """Seconds without a word after which a host counts as lost; in legs sooner, where waiting costs
    more than going on without it. A link may be cut for shorter."""
    restarts: int = rule(default=3, minimum=0)
    """How often nodes are started again after a loss that ends them all, without a new checkpoint
    in between; 0: never."""

    def __post_init__(self) -> None:
        name, _, way = self.monitor.partition(":")
        if self.monitor != "auto" and (not name or way not in ("min", "max")):
            raise ConfigError(
                f"train.monitor = {shown(self.monitor)} must be the name of what evaluations report"
                " and which way is better, as 'loss:min' or 'accuracy:max'"
            )
        if self.until.value is not None and self.monitor == "auto":
            raise ConfigError(
                f"train.until.value = {self.until.value:g} needs train.monitor, which says of what:"
                " set that too, or use train.until.loss or train.until.accuracy"
            )
        for update, length in self.lengths.items():
            if not update.isdecimal() or length < 1:
                raise ConfigError(
                    f"train.lengths.{update} = {length} must be a number of updates under the"
                    " number of an update: --resume writes it, leave it as it is"
                )


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Precision and layout: speed that may change results."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """"auto" is fp32 unless `allow` has bf16 and it is faster."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of images in memory; exact either way."""
    compile: bool = False
    """Compile the model with torch.compile (needs a C++ compiler; slow to start)."""
    allow: tuple[Literal["bf16", "local_batch_norm"], ...] = ()
    """What changes results and may be chosen all the same: bf16, and BatchNorm that normalises each
    part of a divided batch by itself."""


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """How each machine uses its own cores."""

    strategy: str = rule(default="auto", names=STRATEGIES)
    """"auto" finds out while it trains; hogwild is never chosen unless named here."""
    processes: int | None = rule(default=None, minimum=1)
    """For processes and hogwild: how many; one per core when left out."""
    threads: int | None = rule(default=None, minimum=1, maximum=MOST_THREADS)
    """Threads of each process; cores divided by processes when left out."""
    replicas: int | None = rule(default=None, minimum=1)
    """For replicas (threads) and hybrid (rows of stages): how many copies of the model."""
    stages: int | None = rule(default=None, minimum=1)
    """For pipeline and hybrid: how many parts the model is cut into."""
    micro_batches: int | None = rule(default=None, minimum=1)
    """For pipeline and hybrid: parts of the batch in flight; 1 is pure model parallel."""
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    """For pipeline and hybrid: order of forward and backward."""
    split_at: tuple[str, ...] = ()
    """For pipeline and hybrid: names of the layers that each later stage begins with."""
    sync: Literal["auto", "shared", "ddp"] = "auto"
    """For processes: sum gradients in shared memory, or with DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """How machines agree on the weights."""

    kind: str = rule(default="auto", names=EXCHANGES)
    """How nodes agree; "auto" is all-reduce, or in legs what is exact and fastest."""
    partition: Literal["auto", "none", "manual"] = "auto"
    """Which linear layers are split over nodes: chosen from bytes, none, or those in `layers`."""
    layers: tuple[str, ...] = ()
    """With partition = "manual": names of the linear layers that are split by feature."""
    bucket_mb: float = rule(default=8.0, minimum=0.001, maximum=1e6)
    """Megabytes of gradient that leave together."""
    overlap: bool = True
    """Send gradients while the backward pass still runs; false only to see what that gains."""
    compression: Literal["none", "bf16", "powersgd"] = "none"
    """Fewer bytes for allreduce, with error feedback; changes results."""
    rank: int = rule(default=2, minimum=1)
    """With compression = "powersgd": rank of the approximation."""
    mode: Literal["sync", "async"] = "sync"
    """For parameter_server: wait for all workers (Sandblaster), or for none (Downpour)."""
    servers: int = rule(default=1, minimum=1)
    """For parameter_server: how many nodes serve instead of computing."""
    backup: int = rule(default=0, minimum=0)
    """For parameter_server with mode = "sync": how many workers are not waited for."""
    every: int = rule(default=1, minimum=1)
    """Updates between two averages (averaging), or between push and pull (async)."""
    max_staleness: int | None = rule(default=None, minimum=0)
    """For async: a worker further ahead of the slowest than this waits."""
    correct_staleness: bool = False
    """For async: divide a late gradient's rate by its staleness."""
    groups: int | None = rule(default=None, minimum=1)
    """For async: worker groups, synchronous inside; each worker alone when left out."""
    server_groups: int = rule(default=1, minimum=1)
    """For async: groups of servers with a whole copy of the weights each; `servers` counts all."""
    mix_every: int = rule(default=4, minimum=1)
    """For hogwild and server_groups: updates between two mixes with another copy."""
    rebalance: bool = True
    """Change shares when the measured speeds of nodes drift."""

    def __post_init__(self) -> None:
        if self.server_groups > 1 and self.mode == "sync":
            raise ConfigError(
                f"exchange.server_groups = {self.server_groups} needs exchange.mode = 'async':"
                " copies of the weights that wait for each other are one copy"
            )


@dataclass(frozen=True, kw_only=True)
class Observe:
    """What is written down about the run while it runs."""

    events: bool = True
    """Write spans and resource samples of every rank to rank-*/events.jsonl."""
    samples_every: float = rule(default=1.0, minimum=0.0, maximum=A_WEEK)
    """Seconds between two samples of CPU, memory, network and disk; 0 takes none."""
    tensorboard: bool = False
    """Also write event files for TensorBoard into the run's folder `tensorboard`."""

    def __post_init__(self) -> None:
        if 0 < self.samples_every < 0.01:
            raise ConfigError(
                f"observe.samples_every = {self.samples_every:g} must be at least 0.01 s, or 0 for"
                " none: taking a sample takes a part of that"
            )


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """How a training with local.strategy = "auto" finds its fastest way."""

    budget: float = rule(default=0.05, minimum=0.0, maximum=1.0)
    """Part of the expected time that trying other ways may cost; 0 tries none."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that one run was asked to do."""

    name: str = "run"
    """Name of the run; part of its directory's name."""
    seed: int = rule(default=0, minimum=0, maximum=2**63 - 1)
    """Every random choice follows from it: weights, shuffling, augmentation, dropout."""
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    numerics: Numerics = field(default_factory=Numerics)
    local: LocalSettings = field(default_factory=LocalSettings)
    exchange: ExchangeSettings = field(default_factory=ExchangeSettings)
    pilot: Pilot = field(default_factory=Pilot)
    observe: Observe = field(default_factory=Observe)
    versions: dict[str, str] = field(default_factory=dict)
    """What the run was made with; written by Paceline."""

    def __post_init__(self) -> None:
        if not self.name or any(character in self.name for character in "/\\\0\n"):
            raise ConfigError(
                f"name = {shown(self.name)} must be a plain word: it names a directory"
            )
        if len(self.name) > 100:
            raise ConfigError(
                f"name = {shown(self.name)} must have at most 100 characters: it names a directory"
            )
