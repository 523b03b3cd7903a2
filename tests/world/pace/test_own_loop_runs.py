"""Loops of one's own: what a run leaves, how it goes on, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_own_loop import SCRIPT, TOLERANCE, difference, plainly

import paceline

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.world_size(2)]


def test_a_run_goes_on_where_it_stopped(run_cli: Cli, tmp_path: Path) -> None:
    expected = plainly(tmp_path, "shuffled,norm", "--epochs", "4")
    for words in (("--stop", "2"), ()):  # then with another number of ranks
        ranks = "2" if words else "1"
        options = ("--epochs", "4", "--run", "mine", *words)
        done = run_cli("run", "--nproc", ranks, SCRIPT, "shuffled,norm", "out.pt", *options)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("continuing") == 2
    assert difference(expected, tmp_path / "out.pt") < TOLERANCE
    for kind in ("shuffled", "norm"):
        lines = [json.loads(line) for line in (tmp_path / "mine" / kind / "metrics.jsonl").open()]
        assert [line["epoch"] for line in lines] == [1, 2, 3, 4]


def test_what_a_run_leaves_can_be_looked_at(run_cli: Cli, tmp_path: Path) -> None:
    plain: list[float] = []
    for ranks in ("1", "2"):
        words = ("ignored", "out.pt", "--run", ranks)
        done = run_cli("run", "--nproc", ranks, SCRIPT, *words)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (tmp_path / ranks / "metrics.jsonl").open()]
        plain.append(lines[-1]["train_loss"])
        assert lines[-1]["images_per_second"] > 0
    assert plain[0] == pytest.approx(plain[1], abs=1e-6)
    assert plain[0] < lines[0]["train_loss"]
    done = run_cli("report", "2")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "2" / "report.html").read_text()
    assert "train_loss" in page or "train loss" in page.lower()
    assert (tmp_path / "2" / "checkpoints" / "best" / "model.safetensors").exists()
    summary = json.loads((tmp_path / "2" / "run.json").read_text())
    assert (summary["finished"], summary["epochs"], summary["updates"]) == (True, 3, 15)
    assert run_cli("compare", "1", "2").returncode == 0


REFUSED = {
    "loss.backward()": ("loss.backward()", "call pace.backward"),
    "no weight": ("del batch; pace._working.parts.clear(); pace.backward(loss)", "say by what"),
    "ignored targets": (
        "pace.backward(scored(model(batch[0]), torch.tensor([0, -100])))", "1 of 2 targets",
    ),
    "weighed classes": (
        "pace.backward(scored(model(batch[0]), torch.arange(2), 1 + torch.arange(3.0)))",
        "the weights of their classes",
    ),
    "more targets than samples": (
        "pace.backward(scored(model(batch[0]).repeat(3, 1)[:5], torch.zeros(5).long()))",
        "5 targets for 2 samples",
    ),
    "samples held against each other": (
        "pace.backward(model(batch[0]).mean().exp())",
        "what one sample adds to the loss depends on other samples of the batch, of which this"
        " rank has 2 of 4",
    ),
    "counts of a part": (
        "pace.backward((model(batch[0]).mean(0) * torch.arange(3.0) ** (1 + pace.rank)).sum())",
        "what one sample adds to the loss",
    ),
    "statistics of a part": (
        "model.register_buffer('mean', torch.ones(()) * pace.rank); pace.backward(loss)",
        "the model changes mean by each rank's part",
    ),
    "noise of each rank": (
        "pace.backward(loss); model.weight.data.add_(torch.randn(1, 2), alpha=1e-2)",
        "different weights of 0.weight",
    ),
}  # fmt: skip


QUICK = (
    "loss.backward()", "ignored targets", "samples held against each other", "noise of each rank",
)  # fmt: skip


def test_weights_that_cannot_be_saved_are_refused_at_once() -> None:
    model = torch.nn.Linear(2, 1)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(paceline.UserError, match="complex128"):
        paceline.Pace().prepare(model)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in REFUSED],
)
def test_what_would_be_wrong_in_silence_is_refused(run_cli: Cli, tmp_path: Path, case: str) -> None:
    line, sentence = REFUSED[case]
    (tmp_path / "wrong.py").write_text(
        "import paceline, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "def scored(outputs, targets, weight=None):\n"
        "    scores = outputs * torch.ones(3)\n"
        "    return 0.5 * torch.nn.functional.cross_entropy(scores, targets, weight) + 1\n"
        "pace = paceline.Pace()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)\n"
        "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
        "for epoch in pace.epochs(1):\n"
        "    for batch in loader:\n"
        "        loss = model(batch[0]).mean()\n"
        f"        {line}\n"
    )
    done = run_cli("run", "--nproc", "2", "wrong.py")
    assert done.returncode != 0
    assert sentence in done.stderr


def test_looking_at_losses_changes_no_bit(run_cli: Cli, tmp_path: Path) -> None:
    words = ("--shares", "1,1", "--looks")  # that follow no measured speed
    for looks in ("counted", "none"):
        out = ("sum,norm,gan,twice,rare", f"{looks}.pt")
        done = run_cli("run", "--nproc", "2", SCRIPT, *out, *words, looks)
        assert done.returncode == 0, done.stderr
        assert ("looks 0" not in done.stdout) == (looks == "counted"), done.stdout
    assert difference(torch.load(tmp_path / "none.pt"), tmp_path / "counted.pt") == 0.0


@pytest.mark.parametrize("exact", [True, False])
def test_a_contrast_among_samples(run_cli: Cli, tmp_path: Path, exact: bool) -> None:
    """In the third update, as mining after a while: at the first look at that loss."""
    done = two_ranks(
        run_cli,
        tmp_path,
        f"pace = paceline.Pace(exact={exact})",
        "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "loader = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=8)",
        "model, optimizer, loader = pace.prepare(model, optimizer, loader)",
        "for number, inputs in enumerate(loader):",
        "    z = model(inputs)",
        "    pace.backward(z.square().mean() if number < 2 else (z @ z.T).logsumexp(1).mean())",
        "    print('done', number, flush=True)",
    )
    assert ("done 1" in done.stdout, "done 2" in done.stdout) == (True, not exact), done.stderr
    assert (done.returncode == 0) == (not exact)
    assert ("of which this rank has 4 of 8" in done.stderr) == exact


def test_a_rest_that_is_too_small_is_refused_before_training(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "rest.py").write_text(
        "import paceline, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "paceline.Pace().prepare(DataLoader(TensorDataset(torch.ones(9, 2)), batch_size=4))\n"
    )
    done = run_cli("run", "--nproc", "2", "rest.py")
    assert done.returncode != 0
    assert "9 samples in batches of 4 leave one of 1" in done.stderr


def two_ranks(run_cli: Cli, folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Of a script that has `pace`."""
    begin = ("import paceline, torch", "pace = paceline.Pace()")
    (folder / "script.py").write_text("\n".join((*begin, *lines)) + "\n")
    return run_cli("run", "--nproc", "2", "script.py")


def test_a_stream_that_ranks_read_differently_is_refused(run_cli: Cli, tmp_path: Path) -> None:
    done = two_ranks(
        run_cli,
        tmp_path,
        "class Stream(torch.utils.data.IterableDataset):",
        "    def __iter__(self): return iter(torch.rand(8, 2) + pace.rank)",
        "for batch in pace.prepare(torch.utils.data.DataLoader(Stream(), batch_size=4)): pass",
    )
    assert done.returncode != 0
    assert "batch 0 of the stream is not the same on all ranks" in done.stderr


def test_what_ranks_drew_apart_is_divided_as_the_first_drew_it(
    run_cli: Cli, tmp_path: Path
) -> None:
    done = two_ranks(
        run_cli,
        tmp_path,
        "drawn = torch.arange(6) + 10 * pace.rank",
        "columns = pace.part(drawn.view(2, 3), 1).view(-1)",
        "print(pace.rank, pace.part(drawn).tolist(), columns.tolist())",
        "print(pace.sum(2, 0.5, torch.tensor(3)))",
        "pace.save({'rank': pace.rank}, 'saved.pt')",
        "print(torch.load('saved.pt'))",
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[")]
    assert "0 [0, 1, 2] [0, 1, 3, 4]" in lines
    assert "1 [3, 4, 5] [2, 5]" in lines
    assert lines.count("(4, 1.0, 6)") == 2
    assert lines.count("{'rank': 0}") == 2
    assert [path.name for path in tmp_path.glob("*.pt")] == ["saved.pt"]
