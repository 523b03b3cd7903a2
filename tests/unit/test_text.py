"""Foreign texts on a terminal, in a spreadsheet and on a page: they are shown, never obeyed."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table
from written_runs import write_run

from paceline import cli
from paceline.commands import compare, runs
from paceline.report.figure import Table as ReportTable
from paceline.report.write import table_csv
from paceline.text import printable, spreadsheet_cell, terminal

EVIL = "\x1b]0;owned\x07\x1b[31m[red]x[/red]\u202e\x9b1m"


def test_nothing_in_a_text_steers_a_terminal() -> None:
    assert printable("plain é 👩‍💻\n\tmore") == "plain é 👩‍💻\n\tmore"
    shown = printable(EVIL)
    assert shown == "\\x1b]0;owned\\x07\\x1b[31m[red]x[/red]\\u202e\\x9b1m"
    assert printable("\ud800") == "\\ud800"


def test_a_console_prints_brackets_and_escapes_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    console = terminal(width=200)
    console.print(table)
    console.print(EVIL)
    output = capsys.readouterr().out
    assert output.count(printable(EVIL)) == 4
    assert not set("\x1b\x07\x9b\u202e") & set(output)


@pytest.mark.parametrize(
    "formula", ["=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\r=1"]
)
def test_no_cell_is_a_formula(formula: str) -> None:
    rows = ((formula, -1.5), ("-1.5", None))
    text = table_csv(ReportTable(key="t", title="t", columns=("=name", "value"), rows=rows))
    found = list(csv.reader(io.StringIO(text)))
    assert found[0] == ["'=name", "value"]
    assert found[1][0].startswith("'")
    assert found[1][1] == "-1.5"
    assert found[2][0] == "-1.5", "a number stays one"
    assert spreadsheet_cell(7) == 7


def test_a_run_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    one = write_run(tmp_path / "runs" / "one", hosts="a")
    two = write_run(tmp_path / "runs" / "two", hosts="a")
    config = (one / "config.toml").read_text()
    (one / "config.toml").write_text(config.replace('"mnist_cnn"', json.dumps(EVIL)))
    (two / "plan.json").write_text('{"' + json.dumps(EVIL)[1:-1] + '": 1}')
    (two / "race.json").write_text("\x1b[31m")
    for module, arguments in ((runs, [str(one.parent)]), (compare, [str(one), str(two)])):
        done = CliRunner().invoke(module.command, arguments)
        assert done.exit_code == 0, done.output
        assert not set("\x1b\x07\x9b\u202e") & set(done.output), done.output
        assert "[red]x[/red]" in done.output.replace("\n", "")


def test_an_error_cannot_either(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["report", f"/nowhere/{EVIL}"])
    assert caught.value.code == 2
    assert printable(EVIL) in capsys.readouterr().err
