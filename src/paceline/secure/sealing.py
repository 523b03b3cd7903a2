"""How two that know the same secret prove it to each other and seal what they say; no I/O here.

    asks:     magic, nonce                  40 bytes
    listens:  magic, nonce                  40 bytes
    asks:     HMAC(secret, role, purpose, nonces)   32 bytes
    listens:  HMAC(secret, role, purpose, nonces)   32 bytes
    both:     length (4), MAC (16), body    ... until the connection ends

The secret itself never travels. Who asks proves first, so that a listener tells a stranger nothing
but a random number. Every message has a MAC under a key of this connection and direction, over its
number and its body: what was recorded, changed, left out or put in between is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from paceline.errors import ConfigError

MAGIC = b"PACELIN1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAC_BYTES = 16
HEAD = struct.Struct(">I")
LONGEST = 64 * 2**20
"""Bytes of the longest message; only who has proved to know the secret can send one."""
SHORTEST_SECRET = 16
"""Characters of a secret that a person gives: a recorded proof must not be guessed from a list."""


class UnknownPeerError(ConnectionError):
    """The other end does not know the secret, or something in between changes what it says."""


def new_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def checked_secret(text: str) -> str:
    """A secret that a person has given, if it is long enough."""
    if len(text.strip()) < SHORTEST_SECRET:
        raise ConfigError(
            f"the secret has {len(text.strip())} characters and needs {SHORTEST_SECRET}: make one"
            " with `openssl rand -hex 32`"
        )
    return text.strip()


def _digest(secret: bytes, label: str, *parts: bytes) -> bytes:
    """HMAC over the parts, each with its length, so that no two lists read alike."""
    text = b"".join(HEAD.pack(len(part)) + part for part in (label.encode(), *parts))
    return hmac.digest(secret, text, hashlib.sha256)


class Sealing:
    """One end of a connection: bytes that came in, messages out of them, and the other way."""

    def __init__(self, secret: str, purpose: str, *, asks: bool, longest: int = LONGEST) -> None:
        """`purpose`: what the connection is for; proofs for one purpose are none for another."""
        if not secret:
            raise ValueError("a connection needs a secret")
        self._secret, self._purpose = secret.encode(), purpose.encode()
        self._asks, self._longest = asks, longest
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._incoming = bytearray()
        self._output = bytearray(MAGIC + self._nonce if asks else b"")
        self._keys = (b"", b"")
        self._counts = [0, 0]
        self.is_known = False
        """The other end has proved that it knows the secret."""

    def take_output(self) -> bytes:
        """What the handshake has to send now."""
        output, self._output = bytes(self._output), bytearray()
        return output

    @property
    def wanted(self) -> int:
        """How many more bytes may be read of who has not yet proved anything."""
        step = PROOF_BYTES if self._peer_nonce else len(MAGIC) + NONCE_BYTES
        return step - len(self._incoming)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole with these bytes; UnknownPeerError for any that is forged."""
        self._incoming += data
        while not self.is_known:
            if self.wanted > 0:
                return []
            self._step()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _take(self, count: int) -> bytes:
        taken = bytes(self._incoming[:count])
        del self._incoming[:count]
        return taken

    def _step(self) -> None:
        if not self._peer_nonce:
            hello = self._take(len(MAGIC) + NONCE_BYTES)
            if not hello.startswith(MAGIC):
                raise UnknownPeerError("what came is no greeting of this version of Paceline")
            self._peer_nonce = hello[len(MAGIC) :]
            self._output += self._proof(asks=True) if self._asks else MAGIC + self._nonce
            return
        proof = self._take(PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(asks=not self._asks)):
            raise UnknownPeerError("the other end does not know this run's secret")
        if not self._asks:
            self._output += self._proof(asks=False)
        keys = [self._derived(f"paceline key {side}") for side in ("asks", "listens")]
        self._keys = (keys[0], keys[1]) if self._asks else (keys[1], keys[0])
        self.is_known = True

    def _proof(self, *, asks: bool) -> bytes:
        return self._derived(f"paceline proof {'asks' if asks else 'listens'}")

    def _derived(self, label: str) -> bytes:
        nonces = (self._nonce, self._peer_nonce)
        first, second = nonces if self._asks else nonces[::-1]
        return _digest(self._secret, label, self._purpose, first, second)

    def mac(self, body: bytes | bytearray | memoryview, *, sent: bool) -> bytes:
        """The MAC of the next message in a direction; each call counts one."""
        side = 0 if sent else 1
        number = self._counts[side]
        self._counts[side] = number + 1
        # Keyed BLAKE2 is a MAC of its own, and faster than HMAC where files travel.
        digest = hashlib.blake2b(key=self._keys[side], digest_size=MAC_BYTES)
        digest.update(number.to_bytes(8, "big"))
        digest.update(body)
        return digest.digest()

    def verify(self, body: bytes | bytearray | memoryview, mac: bytes) -> None:
        """Refuse a message that is not the next one of the other end."""
        if not hmac.compare_digest(mac, self.mac(body, sent=False)):
            raise UnknownPeerError("a message was changed on its way, or is not its sender's")

    def seal(self, body: bytes) -> bytes:
        """A message as it goes over the wire."""
        if not self.is_known:
            raise UnknownPeerError("the other end has not proved that it knows the secret")
        if len(body) > self._longest:
            raise ValueError(f"a message of {len(body)} bytes is longer than {self._longest}")
        return HEAD.pack(len(body)) + self.mac(body, sent=True) + body

    def _next(self) -> bytes | None:
        head = HEAD.size + MAC_BYTES
        if len(self._incoming) < head:
            return None
        (length,) = HEAD.unpack_from(self._incoming)
        if length > self._longest:
            raise UnknownPeerError(f"a message of {length} bytes is longer than any")
        if len(self._incoming) < head + length:
            return None
        taken = self._take(head + length)
        body = taken[head:]
        self.verify(body, taken[HEAD.size : head])
        return body
