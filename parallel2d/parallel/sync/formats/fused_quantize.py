"""Block quantization of `quantize.py` as one Triton kernel per operation on GPUs.

[Note: fused block codes] Without fusion, quantization runs about 40 operators, and each operator
reads and writes all values. `quantize` and `dequantize_mean` are custom torch operators. On CUDA
and ROCm these operators run the kernels of `fused_kernels.py`, on other devices the methods of
`BlockFormat`. The kernels give the same bits as the methods, because the kernels run the same fp32
operations, with IEEE divisions and without fused multiply-add (``enable_fp_fusion=False``).
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

HALF = 128  # values of half a block; with 4 bits, the two halves share bytes
_SCALE_BYTES = 4


def is_fused(values: Tensor, dtype: torch.dtype) -> bool:
    """Return True if a fused kernel supports ``values``, to quantize from ``dtype`` or dequantize
    to ``dtype``."""
    # A fake tensor is not of the type Tensor, and uses the operators.
    is_plain = type(values) is Tensor and values.device.type == "cuda"
    return is_plain and dtype == torch.float32 and has_triton()


@functools.cache
def has_triton() -> bool:
    """Return True if Triton is installed, as with torch's builds for CUDA and ROCm."""
    return importlib.util.find_spec("triton") is not None


library = torch.library.Library("parallel2d", "DEF")
library.define(
    "quantize_blocks(Tensor blocks, Tensor? places, int first, int stage, int bits) -> Tensor"
)
library.define("dequantize_mean(Tensor sent, int bits) -> Tensor")


def quantize(blocks: Tensor, places: Tensor | None, first: int, stage: int, bits: int) -> Tensor:
    """Quantize blocks; see `BlockFormat.quantize`.

    Args:
        blocks: fp32 [blocks, 256].
        places: int32 [2, all blocks]: position and key of each block, for random numbers; None:
            round to the nearest code.
        first: number of the first block of ``blocks`` among all blocks.
        stage: makes the random numbers differ if the same value is rounded several times.
        bits: 8 or 4.
    """
    found: Tensor = torch.ops.parallel2d.quantize_blocks(blocks, places, first, stage, bits)
    return found


def dequantize_mean(sent: Tensor, bits: int) -> Tensor:
    """Return fp32 [blocks, 256], the mean of ``sent`` [replicas, blocks, bytes of a block].

    Replicas are added in order.
    """
    found: Tensor = torch.ops.parallel2d.dequantize_mean(sent, bits)
    return found


def quantize_by_kernel(
    blocks: Tensor, places: Tensor | None, first: int, stage: int, bits: int
) -> Tensor:
    blocks = blocks.contiguous()
    row_bytes = _SCALE_BYTES + 2 * HALF * bits // 8
    sent = blocks.new_empty(len(blocks), row_bytes, dtype=torch.uint8)
    known = 0 if places is None else places.shape[1]
    launch(
        kernels().quantize,
        len(blocks),
        (blocks, blocks if places is None else places, sent, sent.view(torch.float32)),
        (first, known, stage),
        {"rounds_at_random": places is not None, "bits": bits},
    )
    return sent


def dequantize_by_kernel(sent: Tensor, bits: int) -> Tensor:
    # The kernel reads a view of a longer message without a copy if the scales are aligned.
    is_aligned = sent.stride(0) % _SCALE_BYTES == sent.storage_offset() % _SCALE_BYTES == 0
    if not is_aligned or sent.stride()[1:] != (sent.shape[2], 1):
        sent = sent.contiguous()
    replicas, rows, _ = sent.shape
    values = sent.new_empty(rows, 2 * HALF, dtype=torch.float32)
    launch(
        kernels().dequantize_mean,
        rows,
        (sent, sent.view(torch.float32), values),
        (replicas, sent.stride(0)),
        {"bits": bits},
    )
    return values


def launch(
    kernel: Any, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], kinds: Any
) -> None:
    """Launch one program per block."""
    if programs:
        kernel[(programs,)](*tensors, *numbers, **kinds, num_warps=2, enable_fp_fusion=False)


def kernels() -> Any:
    """Return the module of the kernels. The module is imported here, because the import loads
    Triton."""
    from parallel2d.parallel.sync.formats import fused_kernels

    return fused_kernels


library.impl("quantize_blocks", quantize_by_kernel, "CUDA")
library.impl("dequantize_mean", dequantize_by_kernel, "CUDA")
