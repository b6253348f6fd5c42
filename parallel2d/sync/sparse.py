"""Sends the largest values of each chunk of 4,096 in 2 bits each, for ``sync.wire=sparse``.

[Note: sparse code] A chunk is a 64 x 64 tile of a matrix, or 4,096 neighbours in anything else. Of
each chunk the 64 largest magnitudes are sent: their positions in 12 bits, and in 2 bits the sign
and whether the value is among the larger half. Two numbers in fp32 follow, the mean magnitudes of
both halves. What is lost must be added to the next message (error feedback), or it is lost for
good. After SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

SIDE = 64
CHUNK = SIDE * SIDE
KEPT = 64  # values of a chunk
HALF = KEPT // 2
# 12 bits of position and 2 bits of value for each, and two magnitudes
ROW_BYTES = KEPT * 12 // 8 + KEPT * 2 // 8 + 2 * 4
_POSITION_BYTES = KEPT * 12 // 8
_CODE_BYTES = KEPT * 2 // 8


class SparseExchange:
    """One average over the replicas of ``group`` of what each of them sends of its ``tensors``,
    begun when it is made. Collective: all replicas make them in the same order.

    `finish` writes the mean into ``results``. What is not sent of ``tensors`` stays in them.
    """

    def __init__(
        self, group: dist.ProcessGroup, tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        self._results = results
        self._replicas = group.size()
        self._dtype = tensors[0].dtype
        chunks = torch.cat([to_chunks(tensor) for tensor in tensors])
        sent = encode(chunks)
        # All replicas, this one too, add what was sent.
        left = chunks - decode(sent, self._dtype)
        _put_back(left, tensors)
        self._received = sent.new_empty(self._replicas * len(sent), ROW_BYTES)
        self._work = dist.all_gather_single(self._received, sent, group=group, async_op=True)

    def send_means(self) -> None:
        """Does nothing: every replica adds the contributions of all."""

    def finish(self) -> None:
        """Waits, and writes the mean of what was sent."""
        self._work.wait()
        contributions = self._received.chunk(self._replicas)
        total = decode(contributions[0], self._dtype)
        for contribution in contributions[1:]:
            total += decode(contribution, self._dtype)
        _put_back(total.div_(self._replicas), self._results)


def encode(chunks: Tensor) -> Tensor:
    """uint8 [chunks, ROW_BYTES] from [chunks, 4096]."""
    # Sorted: the larger half comes first.
    positions = chunks.abs().topk(KEPT, dim=1).indices
    values = chunks.gather(1, positions)
    magnitudes = values.abs().view(-1, 2, HALF).mean(2).to(torch.float32)
    is_small = (torch.arange(KEPT, device=chunks.device) >= HALF).to(torch.uint8)
    codes = is_small * 2 + values.signbit().to(torch.uint8)
    parts = [_pack_positions(positions), _pack_codes(codes), magnitudes.view(torch.uint8)]
    return torch.cat(parts, dim=1)


def decode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[chunks, 4096] in ``dtype`` from what `encode` returned; zeros where nothing was sent."""
    packed, codes, magnitudes = rows.split([_POSITION_BYTES, _CODE_BYTES, 8], dim=1)
    positions = _unpack_positions(packed)
    code = _unpack_codes(codes)
    both = magnitudes.contiguous().view(torch.float32).to(dtype)
    values = both.gather(1, (code >> 1).to(torch.int64))
    values = torch.where((code & 1).bool(), -values, values)
    return values.new_zeros(len(rows), CHUNK).scatter_(1, positions, values)


def to_chunks(tensor: Tensor) -> Tensor:
    """[chunks, 4096]; the last ones are filled up with zeros."""
    if not _is_tiled(tensor.shape):
        flat = tensor.reshape(-1)
        return torch.nn.functional.pad(flat, (0, -flat.numel() % CHUNK)).view(-1, CHUNK)
    matrix = tensor.reshape(tensor.shape[0], -1)
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % SIDE, 0, -rows % SIDE))
    tiles = padded.view(-(-rows // SIDE), SIDE, -(-columns // SIDE), SIDE)
    return tiles.transpose(1, 2).reshape(-1, CHUNK)


def chunks_of(shape: torch.Size) -> int:
    """Chunks that a tensor of ``shape`` fills."""
    if not _is_tiled(shape):
        return -(-shape.numel() // CHUNK)
    rows = shape[0]
    return -(-rows // SIDE) * -(-(shape.numel() // rows) // SIDE)


def _from_chunks(chunks: Tensor, tensor: Tensor) -> None:
    """Copies what `to_chunks` has made of such a tensor into ``tensor``."""
    if not _is_tiled(tensor.shape):
        tensor.copy_(chunks.reshape(-1)[: tensor.numel()].view(tensor.shape))
        return
    rows = tensor.shape[0]
    columns = tensor.numel() // rows
    tiles = chunks.view(-(-rows // SIDE), -(-columns // SIDE), SIDE, SIDE).transpose(1, 2)
    matrix = tiles.reshape(-(-rows // SIDE) * SIDE, -1)[:rows, :columns]
    tensor.copy_(matrix.reshape(tensor.shape))


def _put_back(chunks: Tensor, tensors: Sequence[Tensor]) -> None:
    begin = 0
    for tensor in tensors:
        end = begin + chunks_of(tensor.shape)
        _from_chunks(chunks[begin:end], tensor)
        begin = end


def _is_tiled(shape: torch.Size) -> bool:
    """Whether a tensor is cut into tiles: a matrix with at least 64 rows and columns."""
    if len(shape) < 2 or shape[0] < SIDE:
        return False
    return shape.numel() // shape[0] >= SIDE


def _pack_positions(positions: Tensor) -> Tensor:
    """Numbers of 12 bits, two in three bytes."""
    first, second = positions.view(len(positions), -1, 2).unbind(2)
    parts = [first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4]
    return torch.stack(parts, dim=2).flatten(1).to(torch.uint8)


def _unpack_positions(packed: Tensor) -> Tensor:
    low, middle, high = packed.to(torch.int64).view(len(packed), -1, 3).unbind(2)
    first = low | ((middle & 0xF) << 8)
    second = (middle >> 4) | (high << 4)
    return torch.stack([first, second], dim=2).flatten(1)


def _pack_codes(codes: Tensor) -> Tensor:
    """Numbers of 2 bits, four in a byte."""
    a, b, c, d = codes.view(len(codes), -1, 4).unbind(2)
    return a | (b << 2) | (c << 4) | (d << 6)


def _unpack_codes(packed: Tensor) -> Tensor:
    parts = [(packed >> shift) & 3 for shift in (0, 2, 4, 6)]
    return torch.stack(parts, dim=2).flatten(1)
