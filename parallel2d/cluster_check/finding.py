"""What the check says about nodes: `Finding`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """``level``: green, yellow or red. ``check``: which. ``nodes``: numbers of the nodes it is
    about; none: the whole cluster."""

    level: str
    check: str
    text: str
    nodes: Sequence[int] = ()
