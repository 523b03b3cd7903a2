"""Reading experiment.toml: steps, settings, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, DataError
from studies.estimate import estimate, predicted_factor
from studies.outcome import StepOutcome
from studies.running import check, check_data, lab_tables, last_line
from studies.spec import (
    Experiment,
    StudyStep,
    built_in,
    find_experiment,
    flat,
    load_experiment,
)

HEAD = 'name = "mine"\ntitle = "Mine"\n'


def load(folder: Path, text: str, *, quick: bool = False) -> Experiment:
    (folder / "experiment.toml").write_text(HEAD + text)
    return load_experiment(folder, quick=quick)


def test_one_step_of_every_table_of_a_list(tmp_path: Path) -> None:
    experiment = load(
        tmp_path,
        """
[[step]]
name = "{who}-{count}"
each = [{ count = 1, cores = [0.5] }, { count = 2, cores = [0.5, 0.5] }]
facts = { who = "us" }
hosts = "{cores}"
settings = { "local.processes" = "{count}", "workload.data" = "{unknown}" }
""",
    )
    first, second = experiment.steps
    assert (first.name, second.name) == ("us-1", "us-2")
    assert second.hosts == (0.5, 0.5)
    assert second.settings["local.processes"] == 2  # a number, not a text
    assert second.facts == {"who": "us", "count": 2, "cores": [0.5, 0.5]}
    assert second.settings["workload.data"] == "{unknown}"


def test_one_step_of_every_combination(tmp_path: Path) -> None:
    text = '[[step]]\nname = "{a}-{b}"\neach = { a = ["x", "y"], b = [1, 2] }\n'
    assert [step.name for step in load(tmp_path, text).steps] == ["x-1", "x-2", "y-1", "y-2"]


def test_the_most_particular_setting_wins(tmp_path: Path) -> None:
    text = """
[settings]
"train.epochs" = 5
"workload.batch_size" = 128
[settings.optimizer]
name = "sgd"
[quick]
"train.epochs" = 1
[[step]]
name = "a"
settings = { "workload.batch_per_worker" = 32 }
quick_settings = { "optimizer.name" = "adam" }
[[step]]
name = "b"
quick = false
"""
    full, quick = load(tmp_path, text), load(tmp_path, text, quick=True)
    assert full.step("a").settings == {
        "train.epochs": 5,
        "optimizer.name": "sgd",
        "workload.batch_per_worker": 32,  # instead of the other kind of batch
    }
    assert quick.step("a").settings["train.epochs"] == 1
    assert quick.step("a").settings["optimizer.name"] == "adam"
    assert [step.name for step in quick.steps] == ["a"]
    assert full.step("a").fingerprint != quick.step("a").fingerprint


def test_options_are_one_setting() -> None:
    assert flat({"workload": {"model_options": {"dropout": 0.3}}}) == {
        "workload.model_options": {"dropout": 0.3}
    }


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"settings": {"train.epochs": 3}}, True),
        ({"hosts": (0.5, 0.25)}, True),
        ({"rate": "1gbit"}, True),
        ({"seconds": 9.0}, False),
        ({"facts": {"who": "me"}}, False),
    ],
)
def test_what_makes_a_step_another(changed: dict[str, Any], differs: bool) -> None:
    step: dict[str, Any] = {"name": "a", "hosts": (0.5, 0.5)}
    other = step | changed
    assert (StudyStep(**step).fingerprint != StudyStep(**other).fingerprint) == differs


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[[step]]\nname = "a"\nhost = [1.0]', "did you mean 'step 1.hosts'"),
        ('[[step]]\nname = "a/b"', "letters, digits"),
        ('[[step]]\nname = "a"\n[[step]]\nname = "a"', "2 steps are called 'a'"),
        ('[[step]]\nname = "a"\nkind = "peer"', "needs peer"),
        ('[[step]]\nname = "a"\nkind = "dance"', "not one of its choices"),
        ('[[step]]\nname = "a"\neach = 3', "must be a list of tables"),
        ('[[step]]\nname = "a"\nfaults = [{ at = "1s" }]', "no hosts"),
        ("[[step]]\nname = ", "not valid TOML"),
    ],
)
def test_mistakes_are_said_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("[", r"\[")):
        load(tmp_path, text)


def test_wrong_settings_are_found_before_anything_runs(tmp_path: Path) -> None:
    experiment = load(tmp_path, '[[step]]\nname = "a"\nsettings = { "train.epoch" = 1 }')
    with pytest.raises(ConfigError, match=r"step 'a' of mine: .*train\.epochs"):
        check(experiment)
    experiment = load(tmp_path, '[[step]]\nname = "a"\nhosts = [0.0]')
    with pytest.raises(ConfigError, match="cores"):
        check(experiment)


def test_data_that_is_not_here_is_said_first(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workload.data": "mnist", "data.root": str(tmp_path)}
    with pytest.raises(DataError, match="paceline data get mnist"):
        check_data([StudyStep(name="a", settings=settings)])
    check_data([StudyStep(name="a", settings={"workload.data": "digits"}), StudyStep(name="b")])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", ""),
        ("epoch 1\n\nlab: exit code 0 after 3 s\n", "epoch 1"),
        ("worker FAILED\n=====\nlab: exit code 1\n", "worker FAILED"),
        ("epoch 1\npaceline: the disk is full\nlab: exit code 1\n", "the disk is full"),
        ("paceline: rank 0 failed with KeyError: 'x'\nTraceback\nKeyError: 'x'",
         "rank 0 failed with KeyError: 'x'"),
        ("paceline: rank 0 failed with AssertionError:\nTraceback\nAssertionError",
         "rank 0 failed with AssertionError: AssertionError"),
    ],
)  # fmt: skip
def test_what_a_step_said_last(tmp_path: Path, output: str, expected: str) -> None:
    (tmp_path / "output.txt").write_text(output)
    assert last_line(tmp_path / "output.txt") == expected


def test_hosts_become_a_lab() -> None:
    step = StudyStep(
        name="a", hosts=(0.5, {"cores": 1.0, "role": "server"}), visible=2, rate="1gbit"
    )
    assert lab_tables(step) == {
        "link": {"rate": "1gbit"},
        "host": [
            {"name": "a", "slots": 1, "visible": 2, "cores": 0.5},
            {"name": "b", "slots": 1, "visible": 2, "cores": 1.0, "role": "server"},
        ],
    }
    assert step.cores == 1.5


def test_finding_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'wang'"):
        find_experiment("wnag")
    with pytest.raises(ConfigError, match=r"no experiment\.toml"):
        find_experiment(str(tmp_path))


@pytest.mark.parametrize("name", sorted(built_in()))
@pytest.mark.parametrize("quick", [False, True])
def test_every_study_is_in_order(name: str, quick: bool) -> None:
    experiment = load_experiment(find_experiment(name), quick=quick)
    check(experiment)
    assert experiment.steps
    assert experiment.name == name
    for step in experiment.steps:
        assert step.cores <= 2.0 or step.visible, f"{step.name} asks for {step.cores} cores"
    for file in ("README.md", "findings.py", "__init__.py"):
        assert (experiment.folder / file).is_file()


def test_the_estimate_learns_from_what_is_done() -> None:
    def outcome(name: str, declared: float, taken: float | None) -> StepOutcome:
        step = StudyStep(name=name, seconds=declared)
        state = {"failed": "", "seconds": taken} if taken is not None else {}
        return StepOutcome(step=step, path=Path(name), **state)  # type: ignore[arg-type]

    before = [outcome("a", 10, None), outcome("b", 20, None), outcome("c", 0, None)]
    guess = estimate(before)
    assert (guess.seconds, guess.steps, guess.unknown, guess.factor) == (30, 3, 1, None)
    assert "30.0 s for 3 steps, without 1 whose time is not known" in guess.words
    after = [outcome("a", 10, 15), *before[1:]]
    assert estimate(after).seconds == 30  # 20 s at one and a half times the declared time
    assert estimate([outcome("a", 10, 15)]).words == "nothing is left to be run"
    assert estimate([outcome("a", 10, 15)], again=True).seconds == 15


def test_the_predictor_is_asked_only_where_nothing_is_known(tmp_path: Path) -> None:
    step = StudyStep(name="a", seconds=700)
    kept = {"fingerprint": step.fingerprint, "seconds": 1400.0}
    (tmp_path / "predicted.json").write_text(json.dumps(kept))
    new = StepOutcome(step=step, path=tmp_path)
    assert predicted_factor([new], tmp_path) == 2.0
    assert "23 min 20 s for 1 steps" in estimate([new], predicted=2.0).words
    done = StepOutcome(step=StudyStep(name="b", seconds=10), path=tmp_path, failed="", seconds=30)
    assert predicted_factor([done, new], tmp_path) is None
    assert estimate([done, new], predicted=2.0).factor == 3.0  # what was seen is better
    short = StepOutcome(step=StudyStep(name="c", seconds=70), path=tmp_path)
    assert predicted_factor([short], tmp_path) is None
