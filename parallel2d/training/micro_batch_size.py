"""The largest micro-batch size that fits into ``train.memory_gib``, for
``train.micro_batch_size=auto``.

Before the first step `probe_micro_batch_size` runs forward and backward of the parallel model with
increasing sizes. The probe restores buffers and random generators, and leaves no gradients. The
result is equal on all ranks, because each decision uses the peak memory of the rank with the
highest peak. `MicroBatchHalving` repeats a step in smaller micro-batches after an out-of-memory
error.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parallel2d.base.device import (
    empty_cache,
    memory_stats,
    preserve_rng_states,
    reset_peak_memory,
)
from parallel2d.base.errors import ConfigError
from parallel2d.base.metering import control_traffic
from parallel2d.parallel.sync.engine.accumulation import discard_accumulated, no_sync
from parallel2d.training.data.batch import IGNORED, Batch
from parallel2d.training.data.stream import SampleStream
from parallel2d.training.kept_buffers import KeptBuffers
from parallel2d.training.loss.model_loss import ModelLoss

log = logging.getLogger(__name__)

_GIB = 2**30
_AGREEMENT_S = 60.0


def candidates(share: int) -> list[int]:
    """Return the sizes to probe: divisors of ``share``, the samples of a rank in a global batch.
    Each size is at least twice the previous size."""
    found: list[int] = []
    for size in range(1, share + 1):
        if share % size == 0 and (not found or size >= 2 * found[-1]):
            found.append(size)
    return found


def probe_micro_batch_size(
    model: nn.Module,
    loss: ModelLoss,
    stream: SampleStream,
    device: torch.device,
    *,
    share: int,
    limit: int,
    later: int,
) -> tuple[int, str]:
    """Return the largest size that fits, and a line for the log. Collective.

    Args:
        model: the parallel model, without gradients.
        loss: the loss of the model.
        stream: the samples; the probe reads the first samples.
        device: the device of the model.
        share: samples of a rank in a global batch.
        limit: bytes that a rank may use.
        later: bytes that the first steps allocate in addition, such as optimizer state.

    Raises `ConfigError` if one sample needs more than ``limit``.
    """
    measured: dict[int, int] = {}
    for size in candidates(share):
        # A size that does not fit by extrapolation is not tried: if one rank ran out of memory
        # between two collectives, the other ranks would wait for this rank.
        if len(measured) > 1 and _extrapolated(measured, size) > limit:
            break
        peak = torch.tensor([_peak(model, loss, stream, device, size)], dtype=torch.float64)
        peak = peak.to(device)
        with control_traffic():
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        measured[size] = int(peak.item()) + later
        if measured[size] > limit:
            break
    fitting = [size for size, needed in measured.items() if needed <= limit]
    shown = []
    for size, needed in measured.items():
        shown.append(f"{size}: {needed / _GIB:.3f} GiB")
    listed = ", ".join(shown)
    if not fitting:
        raise ConfigError(
            f"train.memory_gib={limit / _GIB:.4g}: one sample per micro-batch needs more on the "
            f"peak-memory rank ({listed}): raise it, use activation_checkpointing=full, or shard "
            "over more ranks"
        )
    return fitting[-1], f"micro-batch {fitting[-1]} of {share} samples fits ({listed})"


class MicroBatchHalving:
    """Halves all micro-batches, only once, if all ranks run out of memory in the same step.

    Collective over all ranks if ``enabled``. The ranks agree in a separate process group with a
    short timeout. The timeout is needed because a rank that did not run out of memory may wait in a
    collective of the step.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, enabled: bool
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._buffers = KeptBuffers(model) if enabled else None
        self._group: Any = None
        self.parts = 1
        if enabled and dist.get_world_size() > 1:
            self._group = dist.new_group(
                backend="gloo",
                timeout=timedelta(seconds=_AGREEMENT_S),
                group_desc="micro_batch_halving",
            )

    def run(self, batches: Sequence[Batch], compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``compute``, which accumulates the gradients of ``split(batches)``.
        Calls ``compute`` again after an out-of-memory error on all ranks."""
        if self._buffers is None:
            return compute()
        self._buffers.keep()
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                if not self._may_repeat(batches, error):
                    raise
            # Up to this point the traceback of the error keeps the activations and the generator of
            # `accumulate` alive. The generator discards the gradient sums only when Python collects
            # it, so the sums are discarded here.
            discard_accumulated(self._model)
            self._optimizer.zero_grad()
            self._buffers.put_back()
            empty_cache(next(self._model.parameters()).device.type)

    def split(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches to compute."""
        found: list[Batch] = []
        for batch in batches:
            found += [batch] if self.parts == 1 else halves(batch)
        return found

    def _may_repeat(self, batches: Sequence[Batch], error: BaseException) -> bool:
        """True if all ranks repeat the step with halved micro-batches. Otherwise ``error`` gets a
        note with the reason. Collective over the ranks that run out of memory."""
        reason = None
        if self.parts > 1:
            reason = "micro-batches were halved once already"
        elif not all(map(halves, batches)):
            reason = "a micro-batch has one sample, or samples without targets"
        problems = torch.tensor([float(reason is not None)])
        if self._group is not None:
            try:
                dist.all_reduce(problems, group=self._group)
            except RuntimeError:
                reason = f"other ranks did not run out of memory within {_AGREEMENT_S:.0f} s"
        if reason is None and problems.item():
            reason = "another rank cannot halve its micro-batches"
        if reason is not None:
            error.add_note(f"the step is not repeated with smaller micro-batches: {reason}")
            return False
        self.parts = 2
        log.warning("out of memory: the step is repeated, and micro-batches are halved from now on")
        return True


def halves(batch: Batch) -> list[Batch]:
    """Return two batches with the samples of ``batch``; an empty list if it cannot be divided."""
    targets = batch.targets
    if targets is None or len(targets) < 2:
        return []
    counts = (targets != IGNORED).reshape(len(targets), -1).sum(1)
    # If the number of targets differs from ``valid_tokens``, the loss does not weight samples by
    # their targets, and the weights of the halves are unknown.
    if int(counts.sum()) != batch.valid_tokens:
        return []
    found: list[Batch] = []
    middle, size = (len(targets) + 1) // 2, len(targets)
    for rows in (slice(0, middle), slice(middle, size)):

        def cut(each: Tensor, rows: slice = rows) -> Tensor:
            is_by_sample = each.ndim and len(each) == size
            return each[rows] if is_by_sample else each

        # Inputs may be a dict by parameter name.
        inputs = tree_map_only(Tensor, cut, batch.inputs)
        ids = None if batch.document_ids is None else cut(batch.document_ids)
        found.append(Batch(inputs, cut(targets), ids, batch.hash, int(counts[rows].sum())))
    return found


def _extrapolated(measured: dict[int, int], size: int) -> float:
    """Extrapolate the bytes for ``size`` linearly from the last two measurements."""
    (before, less), (last, more) = list(measured.items())[-2:]
    return more + (more - less) / (last - before) * (size - last)


def _peak(
    model: nn.Module, loss: ModelLoss, stream: SampleStream, device: torch.device, size: int
) -> int:
    """Return the peak memory of this rank in forward and backward of ``size`` samples."""
    buffers = KeptBuffers(model)
    buffers.keep()
    # A compiled model would be compiled again for each size, so the probe runs eagerly. A compiled
    # model usually needs less memory.
    with preserve_rng_states(), torch.compiler.set_stance("force_eager"):
        batch = stream.read([at % (len(stream) or size) for at in range(size)]).to(device)
        _reset_peak(device)
        # Gradients are not reduced over the replicas, so that error feedback and outer steps do not
        # change.
        with no_sync(model):
            value: Tensor = loss(model, batch)
            value.backward(torch.zeros_like(value))
        peak = _peak_since(device)
    discard_accumulated(model)
    model.zero_grad()
    buffers.put_back()
    return peak


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        reset_peak_memory(device)
        return
    # Without this file the peak is the peak since the start of the process, an upper bound.
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak_since(device: torch.device) -> int:
    if device.type != "cpu":
        return int(memory_stats(device)["reserved_bytes.all.peak"])
    with open("/proc/self/status") as file:
        found = re.search(r"^VmHWM:\s+(\d+) kB", file.read(), re.MULTILINE)
    assert found is not None, "Linux has it"
    return int(found[1]) * 1024
