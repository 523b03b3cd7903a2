"""Names of what can be chosen, open to packages of other people.

A strategy, an exchange, an engine or a data set of one's own is an entry point of an installed
package, so that every rank on every host finds it by its name:

    [project.entry-points."paceline.strategies"]
    mine = "my_package.table:MINE"

What comes with Paceline cannot be replaced by another package.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from paceline.errors import ConfigError, unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """What comes with Paceline by name, and what other packages add."""

    def __init__(self, what: str, group: str, own: Mapping[str, T], kind: type[T]) -> None:
        """`own`: by name. `kind`: what an entry point of `group` must be."""
        self.what, self.group, self.own, self._kind = what, group, own, kind

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in self._added if name not in self.own)

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._added

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        if name not in self._added:
            raise ConfigError(unknown_name(self.what, name, self))
        return self._load(name)

    @functools.cached_property
    def _added(self) -> dict[str, str]:
        """Looked for only where a name is not Paceline's own: it reads all installed packages."""
        return {point.name: point.value for point in entry_points(group=self.group)}

    def _load(self, name: str) -> T:
        value = self._added[name]
        if issubclass(str, self._kind):  # the place of a class, which is imported when it is used
            return value  # type: ignore[return-value]
        found = imported(value, f"{self.what} {name!r}")
        if not isinstance(found, self._kind):
            raise ConfigError(
                f"the entry point {name!r} of {self.group} is {type(found).__name__}, but must be"
                f" {self._kind.__name__}: see paceline.{self._kind.__module__.partition('.')[2]}"
            )
        return found


def imported(place: str, what: str) -> object:
    """What "module:name" names."""
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} cannot be imported from {place!r}: {error}") from None
