"""Two ends of a sealed connection, without any socket."""

from __future__ import annotations

import random

import pytest

from paceline.errors import ConfigError
from paceline.secure.sealing import (
    HEAD,
    MAC_BYTES,
    Sealing,
    UnknownPeerError,
    checked_secret,
    new_secret,
)

SECRET = new_secret()


def ends(
    asking: str = SECRET, listening: str = SECRET, purposes: tuple[str, str] = ("x", "x")
) -> tuple[Sealing, Sealing]:
    return (
        Sealing(asking, purposes[0], asks=True),
        Sealing(listening, purposes[1], asks=False, longest=1000),
    )


def shake(asks: Sealing, listens: Sealing) -> list[bytes]:
    """The whole handshake; all that went over the wire."""
    wire = []
    for sender, receiver in ((asks, listens), (listens, asks)) * 2:
        wire.append(sender.take_output())
        receiver.feed(wire[-1])
    return wire


def test_both_ends_know_each_other_and_the_secret_never_travels() -> None:
    asks, listens = ends()
    wire = shake(asks, listens)
    assert asks.is_known
    assert listens.is_known
    assert SECRET.encode() not in b"".join(wire)
    assert bytes.fromhex(SECRET) not in b"".join(wire)
    assert listens.feed(asks.seal(b"one") + asks.seal(b"two")) == [b"one", b"two"]
    assert asks.feed(listens.seal(b"three")) == [b"three"]


def test_bytes_may_come_one_by_one() -> None:
    asks, listens = ends()
    shake(asks, listens)
    sealed = asks.seal(b"slow")
    found = [message for byte in sealed for message in listens.feed(bytes([byte]))]
    assert found == [b"slow"]


@pytest.mark.parametrize(
    "made",
    [
        lambda: ends(listening=new_secret()),
        lambda: ends(purposes=("control", "store")),
    ],
    ids=["another secret", "another purpose"],
)
def test_who_does_not_know_the_secret_is_refused_by_both(made: object) -> None:
    asks, listens = made()  # type: ignore[operator]
    with pytest.raises(UnknownPeerError, match="does not know this run's secret"):
        shake(asks, listens)
    assert not listens.is_known
    assert listens.take_output() == b""  # who fails is told nothing
    assert not asks.is_known


def test_a_recorded_handshake_is_worth_nothing() -> None:
    asks, listens = ends()
    recorded = shake(asks, listens)
    _, again = ends()
    again.feed(recorded[0])
    with pytest.raises(UnknownPeerError):
        again.feed(recorded[2])


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    """A stranger that only mirrors what it is told does not get in."""
    _, listens = ends()
    hello = b"PACELIN1" + bytes(32)
    listens.feed(hello)
    with pytest.raises(UnknownPeerError):
        listens.feed(listens.take_output()[:32])
    asks, _ = ends()
    asks.feed(asks.take_output())
    with pytest.raises(UnknownPeerError):
        asks.feed(asks.take_output())


def changed(sealed: bytes, at: int) -> bytes:
    return sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]


def test_messages_that_are_changed_repeated_swapped_or_left_out_are_refused() -> None:
    def fresh() -> tuple[Sealing, bytes, bytes]:
        asks, listens = ends()
        shake(asks, listens)
        return listens, asks.seal(b"first"), asks.seal(b"second")

    for at in (HEAD.size, HEAD.size + MAC_BYTES, -1):
        listens, first, _ = fresh()
        with pytest.raises(UnknownPeerError, match="was changed on its way"):
            listens.feed(changed(first, at % len(first)))
    for build in (
        lambda first, second: first + first,
        lambda first, second: second + first,
        lambda first, second: second,
    ):
        listens, first, second = fresh()
        with pytest.raises(UnknownPeerError):
            listens.feed(build(first, second))


def test_one_ends_messages_are_not_its_own_answers() -> None:
    asks, listens = ends()
    shake(asks, listens)
    with pytest.raises(UnknownPeerError):
        asks.feed(asks.seal(b"mirrored"))


def test_a_length_that_nobody_sends_is_refused_at_once() -> None:
    asks, listens = ends()
    shake(asks, listens)
    with pytest.raises(UnknownPeerError, match="is longer than any"):
        listens.feed(HEAD.pack(1001) + bytes(MAC_BYTES))


def test_a_stranger_is_read_a_few_bytes_at_most() -> None:
    _, listens = ends()
    assert listens.wanted == 40
    listens.feed(b"PACELIN1" + bytes(30))
    assert listens.wanted == 2


def test_any_bytes_give_messages_or_that_one_error() -> None:
    generator = random.Random(0)
    for _ in range(300):
        asks, listens = ends()
        if generator.random() < 0.5:
            shake(asks, listens)
        elif generator.random() < 0.5:
            listens.feed(asks.take_output())
        try:
            assert listens.feed(generator.randbytes(generator.randrange(200))) == []
        except UnknownPeerError:
            continue


def test_nothing_is_sealed_for_a_stranger() -> None:
    asks, _ = ends()
    with pytest.raises(UnknownPeerError):
        asks.seal(b"weights")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 5 characters and needs 16: .*openssl rand"):
        checked_secret("tulip")
    with pytest.raises(ValueError, match="needs a secret"):
        Sealing("", "x", asks=True)
