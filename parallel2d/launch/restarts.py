"""Whether workers that failed may try again, and after which pause: `Restarts`.

[Note: a storm of restarts] A count for the whole of a job would end a month's run for its twentieth
lost node; no count would repeat a broken step for ever. So what counts are failures in a row
without a step further than any before. The first of them is followed by a restart at once, the next
ones after 1, 2, 4 ... seconds, a minute at most.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST_PAUSE_S = 60.0


class Restarts:
    """``limit``: failures in a row without progress after which workers still start again.
    ``step``: called after each failure, returns the last step begun."""

    def __init__(self, limit: int, step: Callable[[], int]) -> None:
        self.limit, self._step = limit, step
        self._furthest, self.in_a_row = -1, 0

    def after_failure(self) -> float | None:
        """Seconds to wait before the next try; None when there is none left."""
        step = self._step()
        if step > self._furthest:
            self._furthest, self.in_a_row = step, 0
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            return None
        return 0.0 if self.in_a_row == 1 else min(2.0 ** (self.in_a_row - 2), LONGEST_PAUSE_S)
