"""Loss scaling for fp16: `LossScaler`."""

from __future__ import annotations


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018). All ranks call `update` with the
    same argument, so that the scale is equal on all ranks. With ``enabled=False`` the scale is
    always 1."""

    def __init__(self, enabled: bool, scale: float = 2.0**16, growth_every: int = 1000) -> None:
        self.enabled = enabled
        self.scale = scale if enabled else 1.0
        self.growth_every = growth_every
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halve the scale after a non-finite step; double it after ``growth_every`` consecutive
        finite steps."""
        if not self.enabled:
            return
        if not finite:
            self.good_steps = 0
            self.scale = max(self.scale / 2, 1.0)
            return
        self.good_steps += 1
        if self.good_steps % self.growth_every == 0:
            self.scale = min(self.scale * 2, 2.0**24)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
