"""The door: sockets, TLS, slow clients, who may ask; without torch."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from paceline.errors import ConfigError, shortened
from paceline.serve.connection import Cautious
from paceline.serve.refusals import RefusalError

SMALLEST_TOKEN = 16
"""Characters: fewer could be guessed."""


LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask."""

    token: bytes | None = None
    loopback: bool = True
    """Only names of this machine are taken for Host: a page elsewhere cannot pretend to be us."""

    def admit(self, headers: Mapping[str, str], *, is_open: bool) -> None:
        """Refuse who may not ask; what is open needs no token."""
        if self.loopback and not LOOPBACK.fullmatch(headers.get("host", "")):
            raise RefusalError(
                403, f"Host {headers.get('host', '')[:100]!r} is not this machine: ask localhost"
            )
        if self.token is not None and not is_open:
            kind, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), self.token)
            if kind.lower() != "bearer" or not right:
                raise RefusalError(
                    401,
                    "a token is needed: send it as Authorization: Bearer TOKEN",
                    {"www-authenticate": "Bearer"},
                )


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Where the server listens, and to whom."""

    host: str = "127.0.0.1"
    port: int = 8500
    token: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    plain: bool = False
    """Without TLS although others can reach it: something before it encrypts."""
    connections: int = 512
    """At once; more are answered with 503."""
    drain: int = 30
    """Seconds for requests under way after SIGTERM."""

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Refuse what would let strangers in."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both")
        for file in (self.certificate, self.key):
            if file is not None and not file.is_file():
                raise ConfigError(f"there is no file {file}")
        if self.certificate is not None and self.key is not None:
            _check_certificate(self.certificate, self.key)
        if self.token is not None and len(self.token) < SMALLEST_TOKEN:
            raise ConfigError(f"a token must have {SMALLEST_TOKEN} characters or more")
        if self.is_loopback:
            return
        if self.token is None:
            raise ConfigError(
                f"--host {self.host} can be reached by others: give --token-file with a secret that"
                " they must know, or listen on 127.0.0.1"
            )
        if self.certificate is None and not self.plain:
            raise ConfigError(
                f"--host {self.host} can be reached by others: give --tls-cert and --tls-key, or"
                " --plain where something before it encrypts"
            )

    @property
    def access(self) -> Access:
        return Access(token=self.token.encode() if self.token else None, loopback=self.is_loopback)

    def listen(self) -> socket.socket:
        """A socket that listens; ConfigError where it cannot."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self.host, self.port))
            listening.listen(1024)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"{self.host}:{self.port} cannot be listened on ({error.strerror}):"
                " choose another --port"
            ) from None
        return listening

    def address(self, listening: socket.socket) -> str:
        """Where a browser finds it."""
        scheme = "https" if self.certificate else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{listening.getsockname()[1]}"

    def settings(self, app: Any) -> uvicorn.Config:
        """How the server runs."""
        return uvicorn.Config(
            app,
            http=Cautious,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            limit_concurrency=self.connections,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=self.drain,
            ssl_certfile=str(self.certificate) if self.certificate else None,
            ssl_keyfile=str(self.key) if self.key else None,
        )


def _check_certificate(certificate: Path, key: Path) -> None:
    """What uvicorn would fail on once the server has said that it serves."""
    try:
        # A key behind a password is refused: nobody may be there to type it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {certificate} and --tls-key {key} are no certificate and its key without a"
            f" password, both in PEM: {shortened(str(error))}"
        ) from None


def loop_factory() -> Any:
    """What makes the event loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
