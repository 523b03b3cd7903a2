"""What was seen here of each of the study's claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from studies.lerat.resources import peak_rate
from studies.lerat.speeds import MODELS, WORKS, find, images_per_second, speedup
from studies.outcome import Claim, Outcomes, Verdict

BAR = 1.3
"""Two hosts with Paceline against stock DDP on the same hosts, AlexNet."""
EXACT = 1e-4
"""Largest relative difference of losses that summation order explains."""

Judgement = tuple[bool, str] | None


def claims(outcomes: Outcomes) -> tuple[Claim, ...]:
    return (
        _each("Several processes are faster than one process with a replica per thread"
              " (5.76 against 4, and 15.57 against 6.15).", outcomes, _processes_win),
        _each("On a CPU, model parallelism is pure overhead.", outcomes, _model_loses),
        _each("Joining two machines by MPI, each with its own best local set-up, is faster than"
              " one machine.", outcomes, _hosts_win),
        _each("Averaging inside each machine first and then over MPI beats one rank per core"
              " everywhere (its comparison: Horovod).", outcomes, _local_first_wins),
        _peer("MPI with a local set-up is 6.8 (VGG16) and 4.6 (AlexNet) times as fast as Horovod on"
              " CPUs.", outcomes, "horovod"),
        _peer("Spark is hardly faster than one core (1.14), or slower (0.53).", outcomes, "spark"),
        _traffic(outcomes),
        _bar(outcomes),
        Claim(
            claim="On GPUs, pipelined model parallelism is the best local set-up (6.74 and 8.01).",
            verdict="cannot be tested here",
            because="It needs two GPUs; Paceline's CUDA paths have never been run.",
        ),
    )  # fmt: skip


def _each(claim: str, outcomes: Outcomes, judge: Callable[[Outcomes, str], Judgement]) -> Claim:
    """A claim about both workloads: it holds where it does for all that were measured."""
    found = [(MODELS[work], judge(outcomes, work)) for work in WORKS]
    known = [(model, judged) for model, judged in found if judged is not None]
    if not known:
        return Claim(claim=claim, verdict="cannot be tested here", because="Its steps are not run.")
    verdict: Verdict = "holds" if all(judged[0] for _, judged in known) else "does not hold"
    words = [f"{model}: {judged[1]}" for model, judged in known]
    return Claim(claim=claim, verdict=verdict, because="; ".join(words) + ".")


def _speeds(outcomes: Outcomes, work: str, setups: Sequence[str]) -> dict[str, float]:
    found = {setup: speedup(outcomes, work, setup) for setup in setups}
    return {setup: value for setup, value in found.items() if value}


def _processes_win(outcomes: Outcomes, work: str) -> Judgement:
    found = _speeds(outcomes, work, ("replicas", "processes"))
    if len(found) < 2:
        return None
    text = f"{found['processes']:.2f} against {found['replicas']:.2f} on 2 cores"
    return found["processes"] > found["replicas"], text


def _model_loses(outcomes: Outcomes, work: str) -> Judgement:
    data = _speeds(outcomes, work, ("threads", "replicas", "processes"))
    model = speedup(outcomes, work, "model")
    if not data or model is None:
        return None
    best = max(data, key=lambda setup: data[setup])
    text = f"speedup {model:.2f} with the study's cut, {data[best]:.2f} with {best} on 2 cores"
    return model < data[best], text


def _hosts_win(outcomes: Outcomes, work: str) -> Judgement:
    value = speedup(outcomes, work, "paceline")
    if value is None:
        return None
    return value > 1.0, f"two hosts of one core are {value:.2f} times as fast as one core"


def _local_first_wins(outcomes: Outcomes, work: str) -> Judgement:
    stock = images_per_second(find(outcomes, work, "ddp"))
    own = images_per_second(find(outcomes, work, "study"))
    if stock is None or own is None:
        return None
    text = f"{own / stock:.2f} times stock DDP with a rank per core, the same bytes of gradient"
    return own > stock, text


def _peer(claim: str, outcomes: Outcomes, peer: str) -> Claim:
    found = []
    for work in WORKS:
        own, other = (speedup(outcomes, work, setup) for setup in ("paceline", peer))
        if own and other:
            found.append((own / other, f"{MODELS[work]}: {own / other:.2f} times"))
    if not found:
        steps = [find(outcomes, work, peer) for work in WORKS]
        said = [each.failed for each in steps if each is not None and each.failed]
        because = f"{peer.capitalize()}: {said[0] if said else 'not run'}"
        return Claim(claim=claim, verdict="cannot be tested here", because=because)
    verdict: Verdict = "holds" if all(ratio > 1 for ratio, _ in found) else "does not hold"
    words = "; ".join(text for _, text in found)
    return Claim(claim=claim, verdict=verdict, because=f"Paceline against {peer}: {words}.")


def _traffic(outcomes: Outcomes) -> Claim:
    claim = "The network carries at most 35 KiB/s under MPI (its figure; a doubt)."
    peaks = {work: peak_rate(outcomes, work) for work in WORKS}
    known = {MODELS[work]: peak for work, peak in peaks.items() if peak}
    if not known:
        return Claim(claim=claim, verdict="cannot be tested here", because="Its steps are not run.")
    words = ", ".join(f"{model} {peak:,.0f} MB/s" for model, peak in known.items())
    low = all(peak * 1e6 <= 35 * 1024 for peak in known.values())
    return Claim(
        claim=claim,
        verdict="holds" if low else "does not hold",
        because=f"Peaks sent by a host with gradients or activations of every update: {words}.",
    )


def same_result(outcomes: Outcomes) -> Judgement:
    """Whether two hosts ended with the losses of one machine."""
    one, two = (outcomes.one(place="exact", setup=setup) for setup in ("one", "two"))
    if one is None or two is None or not one.done or not two.done:
        return None
    words, same = [], True
    for key in ("train_loss", "test_loss"):
        first, second = one.number(key), two.number(key)
        if first is None or second is None:
            return None
        same = same and math.isclose(first, second, rel_tol=EXACT)
        words.append(f"{key.replace('_', ' ')} {first:.6f} and {second:.6f}")
    text = f"one machine and two hosts from the same weights, without dropout: {', '.join(words)}"
    return same, f"{text} (untrained: {math.log(3):.4f})"


def _bar(outcomes: Outcomes) -> Claim:
    claim = (
        f"Paceline's own: two hosts train AlexNet at least {BAR} times as fast as stock DDP with a"
        " process per core on the same hosts, with the result of one machine."
    )
    stock = images_per_second(find(outcomes, "simple_big", "ddp"))
    own = images_per_second(find(outcomes, "simple_big", "paceline"))
    exact = same_result(outcomes)
    if stock is None or own is None or exact is None:
        return Claim(claim=claim, verdict="cannot be tested here", because="Its steps are not run.")
    good = own >= BAR * stock and exact[0]
    speed = f"{own:.1f} against {stock:.1f} images/s, {own / stock:.2f} times"
    return Claim(
        claim=claim,
        verdict="holds" if good else "does not hold",
        because=f"{speed}; {exact[1]}.",
    )
