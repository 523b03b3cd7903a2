"""Lab files: what they mean, and one clear sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.lab import HostSpec, LabSpec
from paceline.lab.groups import assign_cores
from paceline.lab.network import shape
from paceline.schema import units

EXAMPLES = Path(__file__).parents[2] / "examples" / "lab"


def load(tmp_path: Path, text: str, *changes: str) -> LabSpec:
    path = tmp_path / "lab.toml"
    path.write_text(text)
    return LabSpec.load(path, changes)


@pytest.mark.parametrize(("name", "hosts"), [("two-hosts", "ab"), ("four-hosts", "abcd")])
def test_examples_load_and_fit_a_machine_of_two_cores(name: str, hosts: str) -> None:
    spec = LabSpec.load(EXAMPLES / f"{name}.toml")
    assert list(spec.addresses) == list(hosts)
    assert sum(host.cores for host in spec.hosts) <= 2
    assert spec.rate_of("a") == 1e9


def test_every_key_can_be_changed_on_the_line() -> None:
    changes = ["link.rate=100mbit", "link.delay=5ms", "host.b.cores=0.5", "host.*.memory=2gb"]
    spec = LabSpec.load(EXAMPLES / "two-hosts.toml", [*changes, "network=10.78.0.0/24"])
    assert spec.rate_of("a") == 1e8
    assert spec.delay_of("b") == 0.005
    assert [host.cores for host in spec.hosts] == [1.0, 0.5]
    assert [host.memory for host in spec.hosts] == ["2gb", "2gb"]
    assert spec.addresses == {"a": "10.78.0.1", "b": "10.78.0.2"}


def test_a_host_overrides_the_link_and_faults_can_be_changed(tmp_path: Path) -> None:
    text = """
        [link]
        rate = "1gbit"
        [[host]]
        name = "a"
        rate = "10mbit"
        visible = 2
        [[fault]]
        at = "10s"
        kind = "cut"
        host = "a"
    """
    spec = load(tmp_path, text, "fault.0.at=500ms")
    assert spec.rate_of("a") == 1e7
    assert spec.host("a").visible_cores == 2
    assert spec.faults[0].seconds == 0.5


HOST = '[[host]]\nname = "a"\n'
MISTAKES = {
    "": "needs at least one [[host]]",
    "hosts = 1": "unknown key 'hosts': did you mean 'host'?",
    "[host]\nname = 'a'": "[[host]] with two brackets",
    "[[host]]\ncores = 1": "a host needs the key 'name'",
    HOST + "core = 2": "unknown key of host 'core': did you mean 'cores'?",
    HOST + "cores = 0": "host.a.cores = 0 must be a number from 0.01",
    HOST + "cores = '1'": "host.a.cores = '1' must be a number",
    HOST + "cores = 4\nvisible = 2": "cannot use more cores than it sees",
    HOST + "visible = 1.5": "host.a.visible = 1.5 must be a whole number from 1",
    HOST + "slots = 0": "host.a.slots = 0 must be a whole number from 1",
    HOST + "memory = '1kb'": 'must be at least "16mib"',
    HOST + "memory = 5": "must be a number and a unit (b, kb, mb",
    HOST + "role = 'boss'": "unknown host.a.role 'boss': Valid: server, worker",
    HOST + HOST: "host 'a' is there 2 times",
    "[[host]]\nname = 'A_b'": "host name 'A_b' must be",
    HOST + "[link]\nrate = '100'": "link.rate = '100' must be a number and a unit",
    HOST + "[link]\nrate = '1bit'": 'at least "8kbit"',
    HOST + "[link]\ndelay = '1h'": "(us, ms, s, min)",
    HOST + "[link]\nlatency = '1ms'": "unknown key of link 'latency': Valid: delay, rate",
    "network = '10.77.0.1/24'\n" + HOST: "must be an IPv4 network in CIDR form",
    "network = '10.77.0.0/30'\n" + HOST + "[[host]]\nname = 'b'": "has room for 1 hosts, not 2",
    HOST + "[[fault]]\nat = '1s'\nkind = 'kil'\nhost = 'a'": "did you mean 'kill'?",
    HOST + "[[fault]]\nat = '1s'\nkind = 'kill'\nhost = 'b'": "unknown fault.host 'b': Valid: a",
    HOST + "[[fault]]\nat = '1s'\nkind = 'throttle'\nhost = 'a'": "rate is None",
    HOST + "[[fault]]\nat = '1s'\nkind = 'slow'\nhost = 'a'": "cores is None",
    HOST + "[[fault]]\nat='1s'\nkind='slow'\nhost='a'\ncores='1'": "must be a number from 0.01",
    HOST + "[[fault]]\nat = 1\nkind = 'kill'\nhost = 'a'": "fault.at = 1 must be",
    HOST + "[[fault]]\nkind = 'kill'\nhost = 'a'": "a fault needs the key 'at'",
    HOST + "[[fault]]\nat='1s'\nkind='cut'\nhost='a'\nprocess='x'": "belongs to pause and resume",
    "[[host]": "is not valid TOML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_the_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert MISTAKES[text] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("link.rate", "must be key=value"),
        ("link.rat=1mbit", "unknown key of link 'rat': did you mean 'rate'?"),
        ("host.c.cores=1", "unknown host 'c': Valid: a, b"),
        ("fault.0.at=1s", "unknown fault '0'"),
        ("speed=1", "unknown key 'speed'"),
    ],
)
def test_a_mistake_on_the_line_is_one_sentence(change: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LabSpec.load(EXAMPLES / "two-hosts.toml", [change])
    assert words in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the lab file 'nowhere\.toml'"):
        LabSpec.load("nowhere.toml")


def test_units() -> None:
    assert units.rate("1.5gbit") == 1.5e9
    assert units.duration("250us") == pytest.approx(250e-6)
    assert units.size("64mib") == 2**26
    assert units.rate_text(100e6) == "100mbit"


def test_cores_go_to_the_least_loaded() -> None:
    hosts = [HostSpec(name=name, cores=0.5) for name in "abcd"]
    assert assign_cores(hosts, [0, 1]) == {"a": [0], "b": [1], "c": [0], "d": [1]}
    both = [HostSpec(name="a", cores=1.0, visible=2), HostSpec(name="b", cores=0.2)]
    assert assign_cores(both, [4, 7]) == {"a": [4, 7], "b": [4]}


def test_a_slow_link_still_lets_a_full_frame_through() -> None:
    words = shape("eth0", 1e6)
    assert int(words[words.index("burst") + 1]) >= 1514
