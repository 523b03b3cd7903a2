"""Configurations: TOML and back, `--set`, and one sentence for everything that is wrong."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import dump_config, load_config, with_versions
from paceline.config.environment import (
    SharedMemory,
    cache_root,
    data_root,
    rank_context,
    rank_environment,
    shared_memory,
    shared_memory_environment,
)
from paceline.config.help import settings_help
from paceline.errors import ConfigError, RunDirectoryError
from paceline.schema import (
    Candidate,
    Config,
    Data,
    LocalSettings,
    NodePlan,
    Numerics,
    Optimizer,
    Plan,
    Race,
    RankContext,
    Rejected,
    Train,
    Until,
    WorkloadSettings,
    decode,
    encode,
    read_json,
    write_json,
)

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\0"), max_size=20
)
NUMBER = st.floats(0.0, 0.9)
COUNT = st.none() | st.integers(1, 10**9)
OPTIONS = st.dictionaries(
    TEXT,
    st.one_of(
        TEXT,
        st.booleans(),
        st.integers(-(2**40), 2**40),
        st.floats(allow_nan=False),
        st.lists(st.integers(0, 500), max_size=4),
    ),
    max_size=3,
)

CONFIGS = st.builds(
    Config,
    name=TEXT.filter(lambda text: text and not set(text) & set("/\\\0\n")),
    seed=st.integers(0, 2**62),
    workload=st.builds(
        WorkloadSettings,
        model=TEXT,
        model_options=OPTIONS,
        classes=st.none() | st.integers(2, 1000),
        weights=st.none() | TEXT,
        freeze=st.booleans(),
        data=TEXT,
        batch_size=COUNT,
    ),
    data=st.builds(Data, root=st.none() | TEXT, limit=COUNT, validation=NUMBER, options=OPTIONS),
    optimizer=st.builds(
        Optimizer,
        name=st.just("sgd"),
        learning_rate=st.floats(1e-9, 10.0),
        reference_batch=COUNT,
        momentum=NUMBER,
        schedule=st.sampled_from(["constant", "linear", "cosine", "step"]),
        clip_norm=st.none() | st.floats(1e-3, 1e3),
    ),
    train=st.builds(
        Train,
        epochs=st.integers(1, 10**6),
        steps=COUNT,
        until=st.builds(
            Until, accuracy=st.none() | NUMBER, loss=st.none() | NUMBER, patience=COUNT
        ),
    ),
    numerics=st.builds(Numerics, allow=st.sampled_from([(), ("bf16",)])),
    local=st.builds(
        LocalSettings,
        strategy=st.sampled_from(["auto", "threads", "pipeline"]),
        processes=COUNT,
        split_at=st.lists(TEXT, max_size=3).map(tuple),
    ),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(config=CONFIGS)
def test_toml_there_and_back(config: Config) -> None:
    assert decode(Config, tomllib.loads(dump_config(config))) == config


@given(config=CONFIGS)
def test_json_there_and_back(config: Config) -> None:
    assert decode(Config, encode(config)) == config


def test_file_there_and_back(tmp_path: Path) -> None:
    config = with_versions(load_config(None, ["local.strategy=hybrid", "train.until.patience=3"]))
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config
    assert load_config(tmp_path) == config  # a run directory stands for its configuration
    assert set(config.versions) == {"python", "paceline", "torch", "numpy"}


def test_the_embedded_default_needs_no_download() -> None:
    assert load_config().workload.data == "digits"


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ("train.epochs=3", "train.epochs", 3),
        (" train.epochs = 3 ", "train.epochs", 3),
        ("optimizer.learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("workload.model=resnet18", "workload.model", "resnet18"),
        ('workload.model="resnet18"', "workload.model", "resnet18"),
        ("workload.model=my.module:make", "workload.model", "my.module:make"),
        ("workload.freeze=true", "workload.freeze", True),
        ('numerics.allow=["bf16"]', "numerics.allow", ("bf16",)),
        ("data.options.shape=[3, 8, 8]", "data.options", {"shape": [3, 8, 8]}),
        ("data.options={ shape = [1, 2] }", "data.options", {"shape": [1, 2]}),
        ("train.until.accuracy=0.99", "train.until.accuracy", 0.99),
        ("name=a=b", "name", "a=b"),
    ],
)
def test_changes(change: str, key: str, expected: object) -> None:
    value: Any = load_config(None, [change])
    for part in key.split("."):
        value = getattr(value, part)
    assert value == expected


def test_later_changes_win_and_one_batch_replaces_the_other() -> None:
    config = load_config(None, ["workload.batch_per_worker=8", "train.epochs=1", "train.epochs=2"])
    assert config.train.epochs == 2
    assert (config.workload.batch_size, config.workload.batch_per_worker) == (None, 8)
    assert config.workload.global_batch(3) == 24
    again = load_config(None, ["workload.batch_per_worker=8", "workload.batch_size=32"])
    assert again.workload.global_batch(3) == 32


# what stands in the file or in --set, and words that the one sentence must have
WRONG = [
    ("trian.epochs=3", ["'trian'", "did you mean 'train'"]),
    ("train.epoch=3", ["'train.epoch'", "did you mean 'train.epochs'"]),
    ("train.until.acuracy=1", ["'train.until.acuracy'", "train.until.accuracy"]),
    ("train.epochs=five", ["train.epochs = 'five'", "a whole number"]),
    ("train.epochs=1.5", ["train.epochs = 1.5", "a whole number"]),
    ("train.epochs=true", ["train.epochs = True", "a whole number"]),
    ("train.epochs=0", ["train.epochs = 0", "at least 1"]),
    ("train.epochs=-2", ["train.epochs = -2", "at least 1"]),
    ("train.deadline=nan", ["train.deadline = nan", "finite number"]),
    ("workload.freeze=1", ["workload.freeze = 1", "true or false"]),
    ("workload.model=3", ["workload.model = 3", "a text"]),
    ("workload.classes=1", ["workload.classes = 1", "at least 2"]),
    ("workload.batch_size=0", ["workload.batch_size = 0", "at least 1"]),
    ("workload.head=replace", ["workload.head", "workload.weights"]),
    ("workload.head=new", ["workload.head = 'new'", "keep, replace"]),
    ("workload.loss=mse", ["workload.loss = 'mse'", "cross_entropy", "module:callable"]),
    ("optimizer.name=adma", ["optimizer.name = 'adma'", "sgd, adam, adamw"]),
    ("optimizer.learning_rate=nan", ["learning_rate = nan", "finite number"]),
    ("optimizer.learning_rate=inf", ["learning_rate = inf", "finite number"]),
    ("optimizer.learning_rate=0", ["learning_rate = 0", "finite number above 0"]),
    ("optimizer.learning_rate=-1", ["learning_rate = -1", "finite number above 0"]),
    ("optimizer.momentum=0.9", ["momentum", "belong to sgd", "'adam'"]),
    ("optimizer.clip_norm=0", ["optimizer.clip_norm = 0", "above 0"]),
    ("optimizer.warmup=1.5", ["optimizer.warmup = 1.5", "at most 1"]),
    ("optimizer.schedule=exp", ["optimizer.schedule = 'exp'", "constant, linear, cosine, step"]),
    ("data.validation=1", ["data.validation = 1", "at most 0.9"]),
    ("data.options=3", ["data.options = 3", "a table of keys"]),
    ("numerics.allow=bf16", ["numerics.allow = 'bf16'", "a list"]),
    ('numerics.allow=["fp8"]', ["numerics.allow[0] = 'fp8'", "bf16"]),
    ("local.strategy=thraeds", ["local.strategy = 'thraeds'", "sequential, threads"]),
    ("seed=-1", ["seed = -1", "at least 0"]),
    ("seed=99999999999999999999999", ["seed = 9999", "at most"]),
    ("seed.x=1", ["'seed' is a value"]),
    ("train=3", ["train is 3", "table of keys"]),
    ("name=a/b", ["name = 'a/b'", "plain word"]),
    ('name=""', ["name = ''", "plain word"]),
    ("train.epochs", ["'train.epochs'", "key=value"]),
    ("=3", ["'=3'", "key=value"]),
    ("train.=3", ["'train.=3'", "key=value"]),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[change for change, _ in WRONG])
def test_one_sentence_for_a_wrong_setting(change: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [change])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ConfigError, match=r"nesterov = true needs optimizer\.momentum"):
        load_config(None, ["optimizer.name=sgd", "optimizer.nesterov=true"])


def test_both_kinds_of_batch_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    file.write_text("[workload]\nbatch_size = 8\nbatch_per_worker = 4\n")
    with pytest.raises(ConfigError, match=r"batch_size = 8 .*batch_per_worker = 4 exclude"):
        load_config(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"train = [", "not valid TOML"),
        (b"name = 'a'\nname = 'b'\n", "not valid TOML"),
        (b"\xff\xfe\x00", "cannot be read as text"),
        (b"[[train]]\nepochs = 1\n", "must be a table"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_missing_file_and_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.toml"):
        load_config(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match=r"there is no file .*config\.toml"):
        load_config(tmp_path)


def test_every_setting_has_a_docstring() -> None:
    sections = dict(settings_help())
    rows = [row for section in sections.values() for row in section]
    assert {"train", "optimizer", "train.until", "local"} <= set(sections)
    for key, text in rows:
        assert text, f"{key} has no docstring"


PLAN = Plan(
    nodes=(NodePlan(strategy="processes", processes=2, cores=(0, 1)), NodePlan(share=0.25)),
    precision="bf16",
    rejected=(Rejected(option="threads 2", images_per_second=10.5, reason="slower"),),
    predicted={"images_per_second": 20.0},
)
RACE = Race(
    candidates=(Candidate(name="sequential", images_per_second=3.5, speedup=1.0),),
    warnings=("busy",),
)


@pytest.mark.parametrize("value", [PLAN, RACE])
def test_json_files_there_and_back(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "value.json", value)
    assert read_json(type(value), tmp_path / "value.json") == value
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a table"),
        ('{"nodse": []}', "unknown key 'nodse': did you mean 'nodes'"),
        ('{"batch_size": 0}', "batch_size = 0 is too small"),
        ('{"nodes": [{"share": -1}]}', r"nodes\[0\].share = -1.* at least 0"),
        ('{"precision": "fp8"}', "precision = 'fp8' is not one of its choices: fp32, bf16"),
    ],
)
def test_damaged_plan_says_where(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=words) as caught:
        read_json(Plan, tmp_path / "plan.json")
    assert "plan.json" in str(caught.value)


def test_missing_json(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"plan\.json does not exist"):
        read_json(Plan, tmp_path / "plan.json")


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="lacks the key 'name'"):
        decode(Candidate, {})


def test_rank_context_from_the_environment() -> None:
    context = RankContext(
        rank=3,
        world_size=8,
        local_rank=1,
        local_size=2,
        node=1,
        nodes=4,
        port=29500,
        backend="mpi",
        secret="0123456789abcdef",
    )
    assert rank_context(rank_environment(context)) == context
    alone = RankContext(port=29500, secret="0123456789abcdef")  # others may join it
    assert rank_context(rank_environment(alone)) == alone
    assert rank_context({}) == RankContext()
    assert "0123456789abcdef" not in repr(context)
    with pytest.raises(ConfigError, match="PACELINE_RANK = 'x' must be a whole number"):
        rank_context(rank_environment(context) | {"PACELINE_RANK": "x"})
    assert (context.replica(2), context.stage(2), context.is_first) == (0, 1, False)


def test_shared_memory_from_the_environment() -> None:
    memory = SharedMemory(board=7, arena=9, parent=123, silent=True)
    assert shared_memory(shared_memory_environment(memory)) == memory
    for damaged in ({}, {"PACELINE_SHARED": "1,2"}, {"PACELINE_SHARED": "a,b,c,d"}):
        with pytest.raises(ConfigError, match="PACELINE_SHARED is missing or damaged"):
            shared_memory(damaged)


def test_places_from_the_environment() -> None:
    assert data_root({}) is None
    assert data_root({"PACELINE_DATA": "/data"}) == Path("/data")
    assert cache_root({"PACELINE_CACHE": "/c"}) == Path("/c")
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/paceline")
    assert cache_root({}) == Path.home() / ".cache" / "paceline"


def test_ranks_of_a_plan() -> None:
    assert NodePlan(strategy="threads", threads=4).ranks == 1
    assert NodePlan(strategy="processes", processes=3).workers == 3
    hybrid = NodePlan(strategy="hybrid", replicas=2, stages=3)
    assert (hybrid.ranks, hybrid.workers) == (6, 2)
    assert math.isclose(sum(node.share for node in PLAN.nodes), 1.25)
