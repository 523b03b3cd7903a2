"""Files that hold a secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from paceline.config.environment import shared_secret
from paceline.errors import ConfigError
from paceline.secure.files import read_private, write_private


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("what lay there before, for all to read")
    path.chmod(0o666)
    write_private(path, "mine")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_private(path) == "mine"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="must be yours alone"):
        read_private(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "secret"
    write_private(target, "theirs")
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        read_private(path)
    write_private(path, "mine")
    assert target.read_text() == "theirs"


def test_the_users_own_key_is_made_once(tmp_path: Path) -> None:
    environment = {"PACELINE_CACHE": str(tmp_path / "cache")}
    first = shared_secret(environment)
    assert len(first) == 64
    assert shared_secret(environment) == first
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["secret"]
    assert shared_secret(environment | {"PACELINE_SECRET": "0123456789abcdef"}) != first
    with pytest.raises(ConfigError, match="needs 16"):
        shared_secret(environment | {"PACELINE_SECRET": "short"})
