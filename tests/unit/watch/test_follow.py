"""What a follower makes of a run's files, held against the whole ledger of the same files."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from written_runs import write_legs, write_run

import paceline
from paceline.errors import ConfigError
from paceline.observe.ledger import ledger_of
from paceline.report.make import make_report
from paceline.report.page import frozen
from paceline.run import RunDirectory
from paceline.schema.events import Note, Progress, Start, encode_line, read_run
from paceline.schema.requests import CHECKPOINT, SETTINGS, STOP, TAKES, ask, taken_by
from paceline.watch.follow import Follower, Tail
from paceline.watch.state import run_of, state_of, track_of, whole_run


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = Tail(file)
    assert tail.lines() == []
    file.write_text("one\ntw")
    assert tail.lines() == ["one"]
    with file.open("a") as more:
        more.write("o\nthree\n")
    assert tail.lines() == ["two", "three"]
    assert tail.lines() == []
    other = tmp_path / "other"
    other.write_text("anew\n")
    other.replace(file)
    assert tail.lines() == ["anew"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("watch") / "run"
    paceline.train(
        paceline.Workload(batch_size=16),
        epochs=2,
        settings={"local.strategy": "sequential", "data.limit": 320},
        run=run,
        silent=True,
    )
    return run


def test_a_run_is_booked_piece_by_piece_as_it_is_as_a_whole(trained: Path, tmp_path: Path) -> None:
    events = (trained / "rank-0" / "events.jsonl").read_text().splitlines(keepends=True)
    growing = tmp_path / "run"
    (growing / "rank-0").mkdir(parents=True)
    for name in ("config.toml", "plan.json", "metrics.jsonl"):
        (growing / name).write_bytes((trained / name).read_bytes())
    follower, pieces = Follower(growing), 0
    for at in range(0, len(events), 7):
        with (growing / "rank-0" / "events.jsonl").open("a") as file:
            file.writelines(events[at : at + 7])
        before = follower.ledger.ranks[0].wall if follower.ledger.ranks else 0.0
        follower.look()
        after = follower.ledger.ranks[0].wall if follower.ledger.ranks else 0.0
        pieces += after > before
    assert pieces > 10
    whole, booked = ledger_of(trained).ranks[0], follower.ledger.ranks[0]
    assert sum(booked.seconds.values()) == pytest.approx(booked.wall)
    for name in ("start_up", "proof"):
        assert booked.seconds[name] == pytest.approx(whole.seconds[name], abs=0.01)
    # The last update of the run is still under way for a follower.
    (session,) = read_run(trained)[0]
    last = max(span.update for span in session.spans if span.update is not None)
    under_way = sum(span.seconds for span in session.spans if span.update == last)
    compute = whole.seconds["compute"]
    assert compute - under_way - 1e-3 <= booked.seconds["compute"] <= compute + 1e-6


def test_a_finished_run_says_so(trained: Path) -> None:
    follower = Follower(trained)
    follower.look()
    state = {name: json.loads(part) for name, part in state_of(follower).items()}
    assert state["head"]["state"] == "finished"
    assert state["head"]["controls"] is None
    track = run_of(follower).track
    assert track is not None
    assert track.update == track.updates > 0
    loss = state["training"]["blocks"][0]["figure"]["series"][1]
    assert (loss["name"], loss["x"]) == ("test", [1, 2])


def test_the_page_of_a_run_that_is_over_is_its_report(trained: Path) -> None:
    follower = Follower(trained)
    follower.look()
    watched = {name: json.loads(part) for name, part in state_of(follower).items()}
    page = frozen(make_report([whole_run(trained)]))
    inside = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(inside) == {f"0/{name}": part for name, part in watched.items()}
    assert {"progress", "training", "ledger", "timeline"} <= set(watched)


def test_a_run_under_way_has_what_is_known_of_it_and_its_controls(
    trained: Path, tmp_path: Path
) -> None:
    growing = tmp_path / "run"
    shutil.copytree(trained, growing)
    (growing / "run.json").unlink()
    (growing / "requests").mkdir(exist_ok=True)
    (growing / "requests" / TAKES).write_text(json.dumps([STOP, SETTINGS]))
    file = growing / "rank-0" / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()[:-1]]
    later = time.time() - lines[0]["time"] - 1.0
    for line in lines:
        line |= {key: line[key] + later for key in ("time", "began", "start") if key in line}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    follower = Follower(growing)
    follower.look()
    state = {name: json.loads(part) for name, part in state_of(follower).items()}
    head = state["head"]
    assert (head["state"], head["controls"]["takes"]) == ("training", [STOP, SETTINGS])
    assert head["updates"][0] > 0
    assert [what for _, what in head["tiles"]][:2] == ["updates", "epoch"]
    assert {"hosts", "ledger", "plan", "asked"} <= set(state)
    assert not {"timeline", "resources", "predicted"} & set(state)


def test_wishes_are_checked(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match="does not take `stop` now"):
        ask(run, STOP)
    run.requests.mkdir()
    (run.requests / TAKES).write_text(json.dumps([STOP, CHECKPOINT, SETTINGS, "remove"]))
    assert taken_by(run) == (STOP, CHECKPOINT, SETTINGS)
    ask(run, CHECKPOINT)
    assert (run.requests / CHECKPOINT).exists()
    for settings, reason in (
        ({}, "no setting is given"),
        ({"workload.model": "x"}, "cannot change while a training runs"),
        ({"train.epochs": 0}, "train.epochs"),
        ({"train.epochs": None}, "train.epochs"),
        ({"train.until.accuracy": 2.0}, "train.until.accuracy"),
    ):
        with pytest.raises(ConfigError, match=reason):
            ask(run, SETTINGS, settings)
    assert not (run.requests / "settings.json").exists()
    ask(run, SETTINGS, {"train.epochs": 7, "train.until.accuracy": None})
    assert json.loads((run.requests / "settings.json").read_text())["train.epochs"] == 7


def test_ranks_that_take_turns_to_tell_progress_make_one_curve(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[workload]\nbatch_size = 10\n")
    told = {0: [(1, 1), (2, 2), (5, 6)], 1: [(3, 3), (4, 4), (5.5, 6), (6.5, 8)]}
    for rank, points in told.items():
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        start = Start(
            rank=rank, node=rank, host=f"h{rank}", pid=1, time=0.0, began=0.0, world_size=2
        )
        progress = [
            Progress(time=float(at), update=update, updates=20, epoch=0, loss=1.0 / update)
            for at, update in points
        ]
        lines = [encode_line(each) for each in (start, *progress)]
        (folder / "events.jsonl").write_text("".join(lines))
    run = Follower(tmp_path)
    run.look()
    assert [(at, round(1 / loss)) for at, loss in run.loss.points] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6.5, 8),
    ]  # fmt: skip
    assert min(value for _, value in run.speed.points) > 0
    assert [host.name for host in track_of(run).hosts] == ["h0", "h1"]


def test_nodes_that_are_started_again_without_a_host(tmp_path: Path) -> None:
    """Of a, b and c the second is lost: c is the second rank then, and there is no third."""
    (tmp_path / "config.toml").write_text("[workload]\nbatch_size = 10\n")
    starts = [(0, "a", 0.0, 3), (1, "b", 0.1, 3), (2, "c", 0.2, 3)]
    starts += [(0, "a", 20.0, 2), (1, "c", 20.1, 2)]
    for rank, host, at, size in starts:
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir(exist_ok=True)
        start = Start(rank=rank, node=rank, host=host, pid=1, time=at, began=at, world_size=size)
        told = Progress(time=at + 5, update=1 + int(at), updates=90, epoch=0, loss=1.0)
        with (folder / "events.jsonl").open("a") as file:
            file.write(encode_line(start) + encode_line(told))
    run = Follower(tmp_path)
    run.look()
    track = track_of(run)
    hosts = {host.name: (host.state, host.began, host.until) for host in track.hosts}
    assert hosts.pop("b") == ("gone", 0.1, 5.1)
    assert list(hosts) == ["a", "c"]
    assert [text for *_, text in track.notes] == ["broken off; all nodes were started again"]
    assert run.began == 0.0


def test_legs_and_progress_are_told_by_one_clock(tmp_path: Path) -> None:
    """Legs count from when the training was asked for, ranks from their own beginning, later."""
    path = write_run(tmp_path / "run")
    write_legs(path)
    events = path / "rank-0" / "events.jsonl"
    start = read_run(path)[0][0].start
    note = Note(time=start.began + 0.5, what="leg", text="first with threads 2: starts at once")
    with events.open("a") as file:
        file.write(encode_line(note))
    follower = Follower(path)
    follower.look()
    assert follower.began == pytest.approx(note.time - follower.legs[0].began_at)
    with events.open("a") as file:  # continued later: legs of then and of now have clocks apart
        file.write(encode_line(replace(start, began=start.began + 900, time=start.time + 900)))
        file.write(encode_line(replace(note, time=note.time + 901)))
    follower.look()
    assert follower.began >= start.began
