"""The share of a device's peak that training reaches while nothing waits for a link:
`compute_efficiency`.

One number for each (device, dtype, compiled), fitted on published throughput by
``python -m tools.bench.published_steps``, which prints how far each row is off.
"""

from __future__ import annotations

# By a part of the device's name. H200 and H100 compute alike.
_DEVICES = {"H100": "H100", "H200": "H100", "A100": "A100"}

_FITTED: dict[tuple[str, str, bool], float] = {
    ("H100", "bf16", False): 0.335,
    ("H100", "bf16", True): 0.366,
    ("H100", "fp8", True): 0.292,
    ("A100", "bf16", True): 0.53,
}


def compute_efficiency(device: str, dtype: str, *, compiled: bool) -> float | None:
    """A share of the peak in ``dtype`` (a word of `PeakConfig`); None where nothing is published
    for it. ``device``: its name."""
    for part, family in _DEVICES.items():
        if part in device:
            return _FITTED.get((family, dtype, compiled))
    return None
