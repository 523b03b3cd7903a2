"""The command line: help, versions, exit codes, output for programs and for pipes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from paceline import cli
from paceline.errors import DivergedError, UserError
from paceline.schema.registry import Registry

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = (
    "--set=local.strategy=sequential",
    "--set=data.limit=64",
    "--set=workload.batch_size=64",
    "--set=train.epochs=1",
    "--set=numerics.precision=fp32",
)


def run_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    output = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, output.out, output.err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(["--help"], capsys)
    assert code == 0
    for name, (_, text) in cli.COMMANDS.items():
        assert f"  {name} " in out
        assert text.split()[0] in out
    assert run_main(["-h"], capsys)[1] == out


def test_commands_of_the_source_are_listed_where_it_is_and_explained_where_it_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(cli.ADDED) == cli.FROM_SOURCE
    nothing_added = Registry[click.Command]("command", "nobody.commands", {}, click.Command)
    monkeypatch.setattr(cli, "ADDED", nothing_added)
    _, out, _ = run_main(["--help"], capsys)
    for name in cli.FROM_SOURCE:
        assert f"  {name} " not in out
        code, _, err = run_main([name, "--help"], capsys)
        assert code == 2
        assert err.startswith(f"paceline: `paceline {name}` comes with Paceline's source")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(["--version"], capsys)
    assert code == 0
    assert out.startswith("paceline, version ")


def test_help_of_train_teaches_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_main(["train", "--help"], capsys)
    for key in ("workload.model", "train.until.accuracy", "optimizer.warmup", "local.strategy"):
        assert key in out


def every_command() -> list[click.Context]:
    """All commands, and what they have below them."""
    found = []
    waiting = [click.Context(cli.paceline, info_name="paceline")]
    while waiting:
        parent = waiting.pop()
        group = parent.command
        assert isinstance(group, click.Group)
        for name in group.list_commands(parent):
            command = group.get_command(parent, name)
            assert command is not None
            context = click.Context(command, info_name=name, parent=parent)
            found.append(context)
            if isinstance(command, click.Group):
                waiting.append(context)
    return found


def test_the_help_of_every_command_has_an_example_of_it() -> None:
    commands = every_command()
    assert len(commands) > len(cli.COMMANDS) + len(cli.FROM_SOURCE)
    for context in commands:
        lines = [line.strip().removeprefix("sudo ") for line in context.get_help().splitlines()]
        examples = [line for line in lines if line.startswith(context.command_path)]
        assert examples, f"`{context.command_path} --help` shows no example"
        if isinstance(context.command, click.Group):
            continue
        known = {option for each in context.command.params for option in each.opts}
        for line in examples:
            own = line.split(" -- ")[0].split("  ")[0]
            used = {word.partition("=")[0] for word in own.split() if word.startswith("--")}
            if context.info_name != "run":  # what follows a script is the script's
                assert used <= known, line


@pytest.mark.parametrize("arguments", [["trian"], ["train", "--nonsense"], ["train", "a", "b"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(arguments, capsys)
    assert (code, out) == (2, "")
    assert "Error: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (UserError("do it otherwise"), 2, "paceline: do it otherwise\n"),
        (DivergedError("too fast"), 1, "paceline: too fast\n"),
        (KeyboardInterrupt(), 130, "paceline: interrupted\n"),
        (click.exceptions.Abort(), 130, "paceline: interrupted\n"),
        (ZeroDivisionError("by zero"), 1, "paceline: internal error: ZeroDivisionError: by zero"),
    ],
)
def test_exit_codes(
    error: BaseException,
    expected: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**arguments: object) -> None:
        raise error

    monkeypatch.setattr(cli.paceline, "main", fail)
    code, out, err = run_main(["train"], capsys)
    assert (code, out) == (expected, "")
    assert err.startswith(words)
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [UserError("x"), ZeroDivisionError("x")])
def test_debug_shows_the_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: object) -> None:
        raise error

    monkeypatch.setattr(cli.paceline, "main", fail)
    with pytest.raises(type(error)):
        cli.main(["--debug", "train"])


def test_json_is_all_there_is(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("train", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["finished"] is True
    assert summary["updates"] == 1
    assert 0 <= summary["test_accuracy"] <= 1
    run = tmp_path / summary["run"]
    assert (tmp_path / "runs" / "latest").resolve() == run.resolve()
    (line,) = (json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines())
    wanted = "epoch train_loss train_accuracy test_loss test_accuracy test_top5 images_per_second"
    wanted += " seconds read_seconds update_seconds_mean update_seconds_median bytes_sent"
    assert set(wanted.split()) <= set(line)
    plan = json.loads((run / "plan.json").read_text())
    assert {"host", "strategy", "share"} <= set(plan["nodes"][0])
    assert {"exchange", "partition", "predicted", "rejected"} <= set(plan)


def test_plain_lines_when_piped(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("train", *SMALL, "--run", "out")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[0].startswith("epoch 1/1  train loss ")
    assert done.stdout.splitlines()[-1] == "run directory: out"
    for heading in ("time to read the data", "time per update (median)", "test accuracy"):
        assert heading in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["train", "--help"]])
def test_a_reader_that_leaves_gets_no_words(arguments: list[str], tmp_path: Path) -> None:
    # The reader is gone before anything is written, which is the hardest case.
    with subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        error = process.stderr.read().decode()
        process.wait(300)
    assert error == ""
    assert process.returncode in (0, 1)  # click ends with 1, and not by a signal
