"""Random numbers for stochastic rounding that depend on nothing but a key and the position.

The same numbers come out on CPU and GPU, and however a tensor is cut into pieces: an integer hash
of the position takes the place of a generator with a state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RoundingKeys:
    """The keys of a job's random numbers. ``step``: the number of the global batch, from 1."""

    seed: int = 0
    step: int = 1

    def of(self, name: str) -> int:
        """That of the parameter ``name`` in this step."""
        return key_of(self.seed, self.step, name)


def key_of(*parts: int | str) -> int:
    """A 32-bit number for ``parts``, such as a seed, a step and a name; signed, as int32 holds
    it."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


MEAN_STAGE = key_of("mean")


def contribution_stage(replica: int) -> int:
    """The stage of `parallel2d.sync.wire.Wire.encode` at which ``replica`` rounds its
    contribution; that of the mean is `MEAN_STAGE`."""
    return key_of("contribution", replica)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """fp32 numbers in [0, 1), one for each pair of ``keys`` and ``positions``, which are int32 and
    broadcast against each other.

    The hash is the finalizer of MurmurHash3 (Appleby), which mixes all 32 bits.
    """
    # Products of int32 wrap around, on every device alike. The constants are those of the hash,
    # written as signed numbers; the first is 2**32 over the golden ratio.
    mixed = positions.mul(-1640531527).bitwise_xor(keys)
    mixed ^= _shifted_right(mixed, 16)
    mixed *= -2048144789
    mixed ^= _shifted_right(mixed, 13)
    mixed *= -1028477387
    mixed ^= _shifted_right(mixed, 16)
    # 24 bits: what fp32 holds exactly.
    return (mixed & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """``values`` shifted to the right, filled with zeros. torch's shift repeats the sign."""
    kept = (1 << (32 - bits)) - 1
    return (values >> bits) & kept
