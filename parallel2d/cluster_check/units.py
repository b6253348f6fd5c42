"""Formats numbers for people: bytes in GiB, rates in GB/s, times in the unit that fits."""

from __future__ import annotations


def in_bytes(value: float) -> str:
    """``1610612736`` -> ``1.5 GiB``."""
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def in_rate(value: float) -> str:
    """Bytes per second: ``125000000`` -> ``125 MB/s``."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B/s"


def in_seconds(value: float) -> str:
    """``0.00005`` -> ``50 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"
