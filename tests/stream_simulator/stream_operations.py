"""The places where the package orders streams, and mutations that drop the operations of one
place.

A place is named by its operation, such as ``wait_stream``, and the two innermost lines of the
package outside of ``parallel2d/base``, which only passes operations on to torch: each caller of a
shared function is a place.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from stream_simulator.sources import PROJECT, caller

_inside = threading.local()


class Site(NamedTuple):
    """A line of the package that issues a stream operation, and the line of its caller."""

    operation: str
    package: str
    place: str

    @property
    def line(self) -> Site:
        """The line with all its callers."""
        return self._replace(place=self.place.partition(" < ")[0])


class StreamOperations:
    """The stream operations of the package in this process."""

    def __init__(self) -> None:
        # In the order of their first call
        self.sites: list[Site] = []
        # The operations of these sites have no effect; a site without a caller stands for all its callers
        self.dropped: frozenset[Site] = frozenset()

    def is_dropped(self, operation: str) -> bool:
        """Note an operation of the package. True if a mutation drops it."""
        by = caller(2)
        if by.source != PROJECT:
            return False
        site = Site(operation, by.package, by.place)
        if site not in self.sites:
            self.sites.append(site)
        return site in self.dropped or site.line in self.dropped


operations = StreamOperations()


def stream_operation(
    name: str, skipped: Callable[..., Any] = lambda *_: None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that a mutation may replace by ``skipped``.

    Calls inside of another stream operation are parts of that one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if getattr(_inside, "active", False):
                return function(*args, **options)
            if operations.is_dropped(name):
                return skipped(*args)
            _inside.active = True
            try:
                return function(*args, **options)
            finally:
                _inside.active = False

        return call

    return decorate
