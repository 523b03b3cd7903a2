"""Tables, figures and verdicts of the buyer's guide: batch size, unequal nodes, more machines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import finite
from studies.outcome import Claim, Findings, Outcomes, StepOutcome, Verdict
from studies.pani.guide import guide_claims, guide_section
from studies.pani.unequal import shares_claim, shares_section

MODELS = {"shallow_cnn": "shallow CNN", "resnet18": "ResNet-18"}
RECIPES = {"plain": "rate 0.01", "recipe": "rate grows with the batch, warm-up"}
LARGE = 512
"""From here on a batch is large in the claims about the recipe."""


def findings(outcomes: Outcomes) -> Findings:
    """Everything that the page shows."""
    sections = [
        *_batch_sections(outcomes),
        shares_section(outcomes),
        guide_section(outcomes),
    ]
    return Findings(
        sections=tuple(section for section in sections if section is not None),
        claims=(
            *_batch_claims(outcomes),
            shares_claim(outcomes),
            *guide_claims(outcomes),
            *_untested(),
        ),
        notes=_notes(outcomes),
    )


def _notes(outcomes: Outcomes) -> tuple[str, ...]:
    data = {str(each.step.settings.get("workload.data")) for each in outcomes.all}
    where = (
        "MNIST's own files."
        if data == {"mnist"}
        else "MNIST was not found (PACELINE_DATA; `paceline data get mnist` fetches it): made"
        " samples of the same size stand in, so that times can be compared and accuracies not."
    )
    samples = []
    for model, title in MODELS.items():
        some = next(iter(outcomes.where(about="batch", model=model)), None)
        if some is not None:
            settings = some.step.settings
            limit, epochs = settings.get("data.limit"), settings["train.epochs"]
            images = f"{limit:,} images" if limit else "all images"
            samples.append(f"{title}: {images}, {_epochs(epochs)}")
    return (
        where,
        f"Training here: {'; '.join(samples)}. ResNet-18 keeps 28x28 through its 3x3 stem and takes"
        " many times as long per image as the shallow network, so it sees only a part of MNIST;"
        " batches above 2048 would need more memory than most machines of this size have, and"
        " more images than that part has. The study does not give its number of epochs.",
        "One machine, 2 threads, fp32. The study's losses are negative or NaN in places, which"
        " points to a missing log-softmax; here the loss is cross-entropy on logits.",
        "GPUs cannot be measured here. What more machines would give is predicted from"
        " measurements of this one (docs/cost.md), not run.",
    )


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' if count != 1 else ''}"


# Batch size


def _batch_sections(outcomes: Outcomes) -> list[Section | None]:
    return [_batch_section(outcomes, model) for model in MODELS] + [_shape_section(outcomes)]


def batches(outcomes: Outcomes, model: str, recipe: str) -> dict[int, StepOutcome]:
    """The finished runs of a series, by batch.

    At the reference batch the recipe changes nothing but the warm-up: the plain run is its start.
    """
    kinds = ("plain",) if recipe == "plain" else ("plain", "recipe")
    found = {}
    for kind in kinds:
        for each in outcomes.where(about="batch", model=model, recipe=kind):
            batch = int(each.step.facts["batch"])
            if each.done and (kind == recipe or batch == 32):
                found[batch] = each
    return dict(sorted(found.items()))


def series_of(
    outcomes: Outcomes, model: str, recipe: str, value: Callable[[StepOutcome], float | None]
) -> dict[int, float]:
    """A quantity by batch, where it is known."""
    found = {batch: value(each) for batch, each in batches(outcomes, model, recipe).items()}
    return {batch: number for batch, number in found.items() if number is not None}


def loss_of(outcome: StepOutcome) -> float | None:
    return outcome.number("test_loss")


def accuracy_of(outcome: StepOutcome) -> float | None:
    return outcome.number("test_accuracy")


def seconds_of(outcome: StepOutcome) -> float | None:
    return outcome.number("epoch_seconds_median")


def _batch_section(outcomes: Outcomes, model: str) -> Section | None:
    if not batches(outcomes, model, "recipe"):
        return None
    title = MODELS[model]
    quantities = (
        ("loss", "Test loss", loss_of, "plain", "After the last epoch, on the test images."),
        ("accuracy", "Test accuracy", accuracy_of, "percent", "After the last epoch."),
        ("time", "Seconds per epoch", seconds_of, "plain",
         "Median over the epochs, evaluation left out."),
    )  # fmt: skip
    figures = []
    for key, name, value, style, caption in quantities:
        series = tuple(
            Series(name=words, look=place, x=tuple(map(float, points)), y=tuple(points.values()))
            for place, (recipe, words) in enumerate(RECIPES.items())
            if (points := series_of(outcomes, model, recipe, value))
        )
        ticks = tuple(float(batch) for batch in batches(outcomes, model, "plain"))
        axis = (
            Axis(title=name.lower(), format="percent", minimum=0.0, maximum=1.0)
            if style == "percent"
            else Axis(title=name.lower(), minimum=0.0)
        )
        figures.append(
            Figure(
                key=f"{model}-{key}",
                title=f"{name} against batch: {title}",
                caption=f"{caption} SGD, {_size(outcomes, model)}",
                x=Axis(title="batch", kind="log", ticks=ticks),
                y=axis,
                series=series,
            )
        )
    return Section(
        key=f"batch-{model}",
        title=f"Batch size: {title}",
        text=(
            "The study trained every batch at the same rate of 0.01. The recipe lets the rate grow"
            " in proportion to the batch, from 0.01 at 32 to 0.16 at 512, and no further, after a"
            " warm-up over a fifth of all updates.",
        ),
        blocks=(*figures, _batch_table(outcomes, model)),
    )


def _size(outcomes: Outcomes, model: str) -> str:
    some = next(iter(batches(outcomes, model, "recipe").values()))
    settings = some.step.settings
    limit = settings.get("data.limit")
    images = f"{limit:,} training images" if limit else "all training images"
    return f"{images}, {_epochs(settings['train.epochs'])}, one run each."


def _batch_table(outcomes: Outcomes, model: str) -> Table:
    plain, recipe = (batches(outcomes, model, kind) for kind in ("plain", "recipe"))
    rows: list[tuple[Cell, ...]] = []
    for batch in sorted({*plain, *recipe}):
        cells: list[Cell] = [batch]
        for found in (plain, recipe):
            cells += _batch_cells(found.get(batch))
        first = plain.get(batch) or recipe[batch]
        speed = first.number("images_per_second")
        memory = _measured(first.result).get("memory_mb")
        rows.append((*cells, seconds_of(first), speed, finite(memory)))
    columns = ["batch"]
    for words in ("plain", "recipe"):
        columns += [f"{words}: updates", f"{words}: rate", f"{words}: loss", f"{words}: accuracy"]
    return Table(
        key=f"batch-{model}",
        title=f"By batch size: {MODELS[model]}",
        columns=(*columns, "epoch s", "images/s", "memory (MB)"),
        rows=tuple(rows),
        formats=(",d", *(",.0f", ".2f", ".4f", ".2%") * 2, ",.2f", ",.0f", ",.0f"),
    )


def _batch_cells(outcome: StepOutcome | None) -> list[Cell]:
    if outcome is None:
        return [None] * 4
    rate = float(outcome.step.settings["optimizer.learning_rate"])
    return [outcome.number("updates"), rate, loss_of(outcome), accuracy_of(outcome)]


def _measured(result: Mapping[str, Any]) -> Mapping[str, Any]:
    found = result.get("measured")
    return found if isinstance(found, Mapping) else {}


def _shape_section(outcomes: Outcomes) -> Section | None:
    """The study's open question: do networks share one curve of time against batch?"""
    curves = {model: series_of(outcomes, model, "plain", seconds_of) for model in MODELS}
    curves = {model: points for model, points in curves.items() if len(points) > 1}
    if len(curves) < 2:
        return None
    series = []
    for place, (model, points) in enumerate(curves.items()):
        first = points[min(points)]
        series.append(
            Series(
                name=MODELS[model],
                look=place,
                x=tuple(map(float, points)),
                y=tuple(value / first for value in points.values()),
            )
        )
    ticks = tuple(sorted({float(batch) for points in curves.values() for batch in points}))
    figure = Figure(
        key="one-curve",
        title="Time per epoch against batch, each network's batch of 32 as 1",
        caption="Median seconds per epoch divided by those at the smallest batch.",
        x=Axis(title="batch", kind="log", ticks=ticks),
        y=Axis(title="part of the time at batch 32", minimum=0.0),
        series=tuple(series),
    )
    text = "The study asked whether networks share one curve of time against batch."
    return Section(key="one-curve", title="One curve?", text=(text,), blocks=(figure,))


# Verdicts


def _claim(claim: str, judged: tuple[bool, str] | None) -> Claim:
    if judged is None:
        return Claim(
            claim=claim, verdict="cannot be tested here", because="Not enough of its steps are run."
        )
    verdict: Verdict = "holds" if judged[0] else "does not hold"
    return Claim(claim=claim, verdict=verdict, because=judged[1])


def _batch_claims(outcomes: Outcomes) -> list[Claim]:
    return [
        _claim("The shallow network's loss rises with the batch.", _loss_rises(outcomes)),
        _claim("ResNet-18 improves in loss and accuracy with larger batches.",
               _resnet_improves(outcomes)),
        _claim("ResNet-18 gives NaN at small batches.", _not_finite(outcomes)),
        _claim("At batch 512 the time doubles.", _doubled(outcomes)),
        _claim("Networks share one curve of time against batch (its question).",
               _one_curve(outcomes)),
        _claim("Paceline's own: a rate that grows with the batch, after a warm-up, gives large"
               " batches back what they lose.", _recipe_helps(outcomes)),
    ]  # fmt: skip


def _loss_rises(outcomes: Outcomes) -> tuple[bool, str] | None:
    losses = series_of(outcomes, "shallow_cnn", "plain", loss_of)
    if len(losses) < 2:
        return None
    values = list(losses.values())
    steps = [after >= before for before, after in itertools.pairwise(values)]
    low, high = min(losses), max(losses)
    text = (
        f"At the same rate and number of epochs: {losses[low]:.3f} at {low}, {losses[high]:.3f} at"
        f" {high}; it rises in {sum(steps)} of {len(steps)} steps. A larger batch makes fewer"
        " updates."
    )
    return values[-1] > values[0] and sum(steps) >= 0.75 * len(steps), text


def _resnet_improves(outcomes: Outcomes) -> tuple[bool, str] | None:
    losses = series_of(outcomes, "resnet18", "plain", loss_of)
    accuracies = series_of(outcomes, "resnet18", "plain", accuracy_of)
    if len(losses) < 2 or len(accuracies) < 2:
        return None
    low, high = min(losses), max(losses)
    text = (
        f"Loss {losses[low]:.3f} and accuracy {accuracies[low]:.1%} at batch {low},"
        f" {losses[high]:.3f} and {accuracies[high]:.1%} at {high}, with the same number of epochs"
        " on a part of MNIST."
    )
    return losses[high] < losses[low] and accuracies[high] > accuracies[low], text


def _not_finite(outcomes: Outcomes) -> tuple[bool, str] | None:
    runs = batches(outcomes, "resnet18", "plain")
    if not runs:
        return None
    bad = [batch for batch, each in runs.items() if loss_of(each) is None]
    smallest = min(runs)
    if bad:
        return min(bad) == smallest, f"The loss was not finite at batch {bad}."
    loss = loss_of(runs[smallest])
    return False, (
        f"All {len(runs)} losses are finite, {loss:.3f} at batch {smallest}; negative and NaN"
        " losses point to a missing log-softmax."
    )


def _doubled(outcomes: Outcomes) -> tuple[bool, str] | None:
    found = []
    for model, title in MODELS.items():
        times = series_of(outcomes, model, "plain", seconds_of)
        if {256, 512, 1024} <= set(times):
            beside = (times[256] + times[1024]) / 2
            found.append((times[512] / beside, f"{title}: {times[512] / beside:.2f} times"))
    if not found:
        return None
    words = "; ".join(text for _, text in found)
    return any(ratio > 1.8 for ratio, _ in found), (
        f"Time per epoch at 512 against the mean of 256 and 1024: {words}."
    )


def _one_curve(outcomes: Outcomes) -> tuple[bool, str] | None:
    curves = [series_of(outcomes, model, "plain", seconds_of) for model in MODELS]
    common = sorted(set(curves[0]) & set(curves[1]))
    if len(common) < 2:
        return None
    shapes = [[curve[batch] / curve[common[0]] for batch in common] for curve in curves]
    apart = max(abs(a - b) / b for a, b in zip(*shapes, strict=True))
    ends = ", ".join(
        f"{title} {shape[-1]:.2f}" for title, shape in zip(MODELS.values(), shapes, strict=True)
    )
    return apart < 0.15, (
        f"Time at batch {common[-1]} against batch {common[0]}: {ends}; the curves are at most"
        f" {apart:.0%} apart, and 15% would count as one curve."
    )


def _recipe_helps(outcomes: Outcomes) -> tuple[bool, str] | None:
    plain = series_of(outcomes, "shallow_cnn", "plain", accuracy_of)
    recipe = series_of(outcomes, "shallow_cnn", "recipe", accuracy_of)
    large = [batch for batch in plain if batch >= LARGE and batch in recipe]
    if not large or 32 not in plain:
        return None
    words = ", ".join(f"{recipe[batch]:.1%} instead of {plain[batch]:.1%} at {batch}"
                      for batch in large)  # fmt: skip
    better = all(recipe[batch] > plain[batch] for batch in large)
    return better, f"Shallow network, accuracy: {words}; {plain[32]:.1%} at 32."


def _untested() -> tuple[Claim, ...]:
    because = "It needs GPUs of several kinds; none is here."
    claims = (
        "ResNet-18's time hardly changes from 1 to 8 GPUs.",
        "Cards of one year differ by 20 times in speed.",
    )
    return tuple(
        Claim(claim=claim, verdict="cannot be tested here", because=because) for claim in claims
    )
