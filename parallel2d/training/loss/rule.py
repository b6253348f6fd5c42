"""`find_rule` finds the divisor of a custom loss.

[Note: a mean that a model returns] Training needs the sum of the losses over valid targets (see
[Note: the mean over valid tokens]). A model that computes its own loss usually returns a mean. The
mean is over all targets except ignored targets (-1 in nanoGPT, -100 in transformers). If the model
shifts labels internally, the first target of each sequence is also excluded. The trainer multiplies
this mean by its divisor, the number of targets in the mean. The divisor is found before training
with three samples, the first of which has a single valid target. The model's calls of torch's
cross-entropy show which target is ignored, and how many targets count. Then three losses are
computed: the loss of the first sample, the loss of the other two samples, and the loss of all three
samples. The loss of all three samples must be the sum of the other two losses, or the mean of the
other two losses with the divisors as weights. Otherwise the loss depends on the assignment of
samples to micro-batches, and therefore on the layout, and the loss is refused.

A term in addition to the cross-entropy, such as a load-balancing loss of experts, may be too small
for this comparison. Therefore the losses are computed again with all cross-entropies replaced by
zero, so that only this term remains, and the comparison is relative to the term. With untrained,
nearly balanced routers the term is nearly the same for all samples. Therefore the comparison is
repeated with other weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import sendable
from parallel2d.parallel.loss import loss_bound
from parallel2d.training.data.batch import IGNORED

SAMPLES = 3
_PARTS = (slice(None), slice(1), slice(1, None))


@sendable
@dataclass(frozen=True)
class LossRule:
    """The divisor of a custom loss."""

    divisor: str  # "none" (the loss is a sum), "targets" or "samples"
    ignored: int | None = None  # the value of ignored targets; None: unknown
    shift: int = 0  # number of excluded targets at the start of each sequence

    def count(self, targets: Tensor | None, samples: int) -> int:
        """Return the divisor for a micro-batch with ``targets`` [n, ...]. ``samples``: number of
        samples."""
        if self.divisor == "none":
            return 1
        if self.divisor == "samples" or targets is None:
            return samples
        read = targets[:, self.shift :] if targets.ndim > 1 else targets
        return int((read != (IGNORED if self.ignored is None else self.ignored)).sum())


class CrossEntropyCalls(TorchFunctionMode):
    """Context that records the calls of torch's cross-entropy. With ``omits`` the calls return
    zeros."""

    def __init__(self, omits: bool = False) -> None:
        super().__init__()
        self._omits = omits
        self.ignored: set[int] = set()  # values of ``ignore_index``
        self.counts: set[int] = set()  # numbers of targets that are not ignored

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (F.cross_entropy, F.nll_loss):
            given = inspect.signature(function).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            ignored, target = given.arguments["ignore_index"], given.arguments["target"]
            if not target.is_floating_point():
                self.ignored.add(ignored)
                self.counts.add(int((target != ignored).sum()))
            if self._omits:
                return torch.zeros_like(function(*args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


# (targets, rows) -> loss of these rows of the samples; None if the model returns logits
Run = Callable[[Tensor | None, slice], Tensor | None]


def find_rule(
    run: Run,
    targets: Tensor | None,
    *,
    ignored: int | None,
    is_declared: bool,
    bound: float,
    other_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> LossRule | None:
    """Find the divisor; see [Note: a mean that a model returns]. Returns None if the model returns
    logits.

    Args:
        run: computes the loss of some of the samples, selected by rows.
        targets: the targets of `SAMPLES` samples.
        ignored: the value of ignored targets, if known; None otherwise.
        is_declared: True if the user has declared a mean per micro-batch. The losses are then not
            compared.
        bound: the largest expected relative rounding error.
        other_weights: returns a context in which the model has other weights.

    Raises:
        ConfigError: the loss of all samples is neither the sum nor the weighted mean of the losses
        of its parts.
    """
    has_classes = targets is not None and not targets.is_floating_point()
    if has_classes:
        assert targets is not None
        targets = targets.clamp(min=0)  # makes all targets valid
    with CrossEntropyCalls() as calls:
        value = run(targets, slice(None))
    if value is None:
        return None
    # The loss may be in fp32 although the logits are in 16 bits, so the bound of its dtype must not
    # lower `bound`.
    bound = max(bound, loss_bound(value.dtype))
    if len(calls.ignored) == 1:
        (ignored,) = calls.ignored
    if has_classes and ignored is not None:
        assert targets is not None
        if targets.ndim > 1:
            targets[0] = ignored
            targets[0].view(-1)[-1] = int(ignored == 0)
    counts_classes = has_classes and ignored is not None
    rule = _rule_of_parts(run, targets, ignored, counts_classes, is_declared, bound)
    if not is_declared and _check_terms(run, targets, rule, bound / 10):
        with other_weights():
            _check_terms(run, targets, rule, bound / 10)
    return rule


def _check_terms(run: Run, targets: Tensor | None, rule: LossRule, bound: float) -> bool:
    """Check the loss with its cross-entropies replaced by zero. Return True if a term remains: the
    loss has another term, or is not a cross-entropy. Raises `ConfigError` as `find_rule`."""
    losses = []
    with CrossEntropyCalls(omits=True):
        for rows in _PARTS:
            value = run(targets, rows)
            assert value is not None, "it gave logits"
            losses.append(float(value))
            if not losses[0]:
                return False
    difference = abs(_expected(rule, losses, targets) - losses[0])
    # With other weights the loss may overflow.
    if math.isfinite(difference) and difference > bound * max(map(abs, losses)):
        raise ConfigError(_refusal(losses, _counts(rule, targets), bound, is_term=True))
    return True


def _expected(rule: LossRule, losses: Sequence[float], targets: Tensor | None) -> float:
    """Return the loss of all samples that follows from ``rule`` and the losses of the two parts."""
    if rule.divisor == "none":
        return losses[1] + losses[2]
    whole, first, rest = _counts(rule, targets)
    return (first * losses[1] + rest * losses[2]) / whole


def _rule_of_parts(
    run: Run,
    targets: Tensor | None,
    ignored: int | None,
    counts_classes: bool,
    is_declared: bool,
    bound: float,
) -> LossRule:
    """Return the rule by which the losses of the two parts give the loss of all samples."""
    losses, seen = [], []
    for rows in _PARTS:
        with CrossEntropyCalls() as calls:
            value = run(targets, rows)
        assert value is not None, "it gave logits"
        losses.append(float(value))
        seen.append(calls.counts)

    rules = _candidates(targets, ignored, counts_classes, seen)
    if is_declared:
        return rules[1]
    for rule in rules:
        expected = _expected(rule, losses, targets)
        # A loss of zero would satisfy every rule.
        if losses[0] and abs(expected - losses[0]) <= bound * abs(losses[0]):
            return rule
    raise ConfigError(_refusal(losses, _counts(rules[1], targets), bound))


def _candidates(
    targets: Tensor | None, ignored: int | None, counts_classes: bool, seen: list[list[int]]
) -> list[LossRule]:
    rules = [LossRule("none", ignored)]
    # A shift must agree with the counts of the cross-entropy calls. If the loss has no such calls,
    # only a shift of 0 is considered.
    for shift in (0, 1) if counts_classes else ():
        rule = LossRule("targets", ignored, shift)
        pairs = zip(_counts(rule, targets), seen, strict=True)
        if all(count in found for count, found in pairs) or (not seen[0] and shift == 0):
            rules.append(rule)
    rules.append(LossRule("samples", ignored))
    return rules


def _counts(rule: LossRule, targets: Tensor | None) -> list[int]:
    found = []
    for rows in _PARTS:
        part = None if targets is None else targets[rows]
        found.append(rule.count(part, len(range(SAMPLES)[rows])))
    return found


def _refusal(
    losses: Sequence[float], counts: Sequence[int], bound: float, is_term: bool = False
) -> str:
    whole, first, rest = losses
    called = "the term next to the cross-entropy in the loss" if is_term else "the loss"
    what = "neither a sum nor a mean over its targets or samples, and so depends on the layout"
    if not whole or not math.isfinite(whole):
        what = "not a number that shows its divisor"
    elif abs((first + rest) / 2 - whole) <= bound * abs(whole):
        what = (
            "a mean per micro-batch for any number of valid targets, and so depends on the layout"
        )
    return (
        f"{called} of {SAMPLES} samples is {whole:.7g}, of the first of them {first:.7g} and of "
        f"the others {rest:.7g}, with {counts[1]} and {counts[2]} valid targets: it is {what}; "
        "give train.loss a function of the output that adds up, or accept that with "
        "train.loss_is=mean_per_micro_batch"
    )
