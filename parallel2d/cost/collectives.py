"""Bytes that a rank sends in one collective."""

from __future__ import annotations


def sent_bytes(collective: str, whole_bytes: float, size: int, device_type: str) -> float:
    """Bytes that one rank sends, mean over the ranks of a group of ``size``.

    ``whole_bytes``: the larger side of the collective: the output of ``all_gather``, the input of
    ``reduce_scatter`` and ``all_to_all``, the tensor of ``all_reduce``. Bandwidth-optimal
    algorithms (ring; Thakur et al. 2005) send (n-1)/n of it, and an all-reduce twice that. Gloo
    (CPU tensors) has no reduce-scatter of its own: it costs an all-reduce. Raises KeyError for
    another collective.
    """
    reduce_scatter = 2 if device_type == "cpu" else 1
    passes = {"all_gather": 1, "all_to_all": 1, "reduce_scatter": reduce_scatter, "all_reduce": 2}[
        collective
    ]
    return passes * (size - 1) / size * whole_bytes
