"""What is better, and when enough: accuracy where there are classes, else the loss."""

from __future__ import annotations

import math

import pytest

from paceline.errors import ConfigError
from paceline.schema.config import Until
from paceline.training.evaluate import Score
from paceline.training.goal import Goal


def with_classes(accuracy: float, loss: float = 1.0) -> Score:
    return Score(loss=loss, accuracy=accuracy, top5=1.0)


def without(loss: float) -> Score:
    return Score(loss=loss, accuracy=None, top5=None)


def test_with_classes_the_accuracy_decides() -> None:
    goal = Goal(Until(patience=2))
    scores = [with_classes(0.5, 1.0), with_classes(0.6, 2.0), with_classes(0.6, 0.5)]
    assert [goal.note(score) for score in scores] == [True, True, False]
    assert (goal.best_accuracy, goal.best_loss, goal.since_best) == (0.6, 0.5, 1)
    assert goal.reached() is None
    goal.note(with_classes(0.1))
    assert goal.reached() == "no higher test accuracy in 2 evaluations: train.until.patience is met"


def test_without_classes_the_loss_decides() -> None:
    goal = Goal(Until(patience=2))
    assert [goal.note(without(loss)) for loss in (3.0, 2.0, 2.5)] == [True, True, False]
    assert (goal.best_accuracy, goal.best_loss, goal.since_best) == (None, 2.0, 1)
    assert goal.note(None) is False
    assert goal.reached() is None
    goal.note(without(2.0))
    assert goal.reached() == "no lower test loss in 2 evaluations: train.until.patience is met"


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    goal = Goal(Until())
    assert [goal.note(without(loss)) for loss in (math.nan, math.inf, 5.0)] == [False, False, True]
    assert goal.best_loss == 5.0


def test_until_loss_holds_with_and_without_classes() -> None:
    for score in (with_classes(0.5, 0.2), without(0.2)):
        goal = Goal(Until(loss=0.2))
        goal.note(with_classes(0.4, 0.3) if score.accuracy else without(0.3))
        assert goal.reached() is None
        goal.note(score)
        assert goal.reached() == "test loss 0.2 reached: train.until.loss is met"


def test_until_accuracy_is_refused_without_classes() -> None:
    goal = Goal(Until(accuracy=0.9))
    goal.check(classes=True)
    for refuse in (lambda: goal.check(classes=False), lambda: goal.note(without(0.1))):
        with pytest.raises(
            ConfigError, match=r"train\.until\.accuracy = 0\.9 .*train\.until\.loss"
        ):
            refuse()


def reporting(**metrics: float) -> Score:
    return Score(loss=1.0, accuracy=0.5, top5=1.0, metrics=dict(metrics))


def test_what_is_monitored_decides() -> None:
    goal = Goal(Until(patience=2, value=0.1), "mae:min")
    found = [goal.note(reporting(mae=mae)) for mae in (0.5, 0.4, 0.6, math.nan)]
    assert found == [True, True, False, False]
    assert goal.best_value == 0.4
    assert goal.reached() == "no lower test mae in 2 evaluations: train.until.patience is met"
    assert goal.note(reporting(mae=0.05))
    assert goal.reached() == "test mae 0.05 reached: train.until.value is met"
    higher = Goal(Until(), "bleu:max")
    assert [higher.note(reporting(bleu=value)) for value in (0.5, 0.4, 0.6)] == [True, False, True]
    with pytest.raises(ConfigError, match="names nothing that evaluations report: use one of loss"):
        Goal(Until(), "mae:min").note(reporting(rmse=1.0))
