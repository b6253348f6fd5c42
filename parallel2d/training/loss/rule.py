"""Finds the divisor of a custom loss: `find_rule`.

[Note: a mean that a model returns] Training needs the sum over valid targets (see [Note: the mean
over valid tokens]). A model that computes its own loss returns a mean over the targets that it does
not ignore (it ignores -1 in nanoGPT, -100 in transformers), possibly without the first target of
each sequence if it shifts labels internally. This mean is multiplied by its divisor. The divisor is
found before training with three samples; the first sample has a single valid target. The calls of
torch's cross-entropy show which target is ignored and how many targets count. Then the loss of all
three samples must be the sum, or the mean with this divisor, of the loss of the first sample and
the loss of the other two. A loss with neither property depends on the samples that share a
micro-batch, and therefore on the layout.

A term next to the cross-entropy, such as a balancing loss of experts, may be so small that the sum
hides it. Therefore the losses are computed once more with all cross-entropies replaced by zero, so
that only this term remains, and are compared relative to the term. With untrained, nearly balanced
routers the term is nearly the same for any samples. Therefore it is also compared with other
weights.
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

    divisor: str  # none (the loss is a sum), targets or samples
    ignored: int | None = None  # the target that the loss ignores; None: unknown
    shift: int = 0  # number of targets at the start of a sequence that the loss does not read

    def count(self, targets: Tensor | None, samples: int) -> int:
        """Return the divisor for ``targets`` [n, ...] of this number of samples."""
        if self.divisor == "none":
            return 1
        if self.divisor == "samples" or targets is None:
            return samples
        read = targets[:, self.shift :] if targets.ndim > 1 else targets
        return int((read != (IGNORED if self.ignored is None else self.ignored)).sum())


class CrossEntropyCalls(TorchFunctionMode):
    """Records the calls of torch's cross-entropy in its context; with ``omits`` they return
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


# (targets, rows) -> the loss of these rows, or None if the model returns logits
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
    """Find the divisor; see [Note: a mean that a model returns]. None if the model returns logits.

    Args:
        run: computes the loss of some rows.
        targets: the targets of `SAMPLES` samples.
        ignored: the target that the loss is known to ignore; None: unknown.
        is_declared: the user declared a mean per micro-batch, so the losses of the parts are not
            compared.
        bound: the largest relative error of the computation.
        other_weights: a context in which the model has other weights.

    Raises:
        ConfigError: the losses of the parts do not combine to the loss of all samples.
    """
    has_classes = targets is not None and not targets.is_floating_point()
    if has_classes:
        assert targets is not None
        targets = targets.clamp(min=0)  # makes all targets valid
    with CrossEntropyCalls() as calls:
        value = run(targets, slice(None))
    if value is None:
        return None
    # Models of transformers compute their loss in fp32 for any dtype of the logits.
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
    """True if the loss has a term in addition to the cross-entropy, or is not a cross-entropy.
    Raises `ConfigError` if the losses of the parts do not combine to the loss of all samples."""
    losses = []
    with CrossEntropyCalls(omits=True):
        for rows in _PARTS:
            value = run(targets, rows)
            assert value is not None, "it gave logits"
            losses.append(float(value))
            if not losses[0]:
                return False
    difference = abs(_expected(rule, losses, targets) - losses[0])
    # Other weights may overflow.
    if math.isfinite(difference) and difference > bound * max(map(abs, losses)):
        raise ConfigError(_refusal(losses, _counts(rule, targets), bound, is_term=True))
    return True


def _expected(rule: LossRule, losses: Sequence[float], targets: Tensor | None) -> float:
    """Return the loss of all samples, computed from the losses of the parts."""
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
    """Return the rule that combines the losses of the parts to the loss of all samples."""
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
        # Zeros would satisfy every rule.
        if losses[0] and abs(expected - losses[0]) <= bound * abs(losses[0]):
            return rule
    raise ConfigError(_refusal(losses, _counts(rules[1], targets), bound))


def _candidates(
    targets: Tensor | None, ignored: int | None, counts_classes: bool, seen: list[list[int]]
) -> list[LossRule]:
    rules = [LossRule("none", ignored)]
    # A shift must agree with the counts of cross-entropy; a function without calls has no shift.
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
