"""What a request is answered with that cannot be: a status, and one sentence."""

from __future__ import annotations


class RefusalError(Exception):
    """An answer of status 400 and above; `{"error": "..."}` in every protocol."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}
