"""What a loss that is not ours was divided by: `find_rule`.

[Note: a mean that a model returns] Training needs the sum over valid targets (see [Note: the mean
over valid tokens]), and a model that computes its own loss returns a mean: over those of its
targets that it does not ignore (-1 in nanoGPT, -100 in transformers), perhaps without the first of
each sequence, where it shifts labels itself. It is multiplied by what it was divided by. What that
is, is found before training on three samples, the first of which has a single valid target. The
calls of torch's cross-entropy tell which target is ignored and how many count; then the losses of
the first sample and of the others must give the loss of all, as sums or as such means do. A loss
that does neither depends on which samples share a micro-batch, and so on the layout.

A term next to the cross-entropy, such as a balancing loss of experts, may be so small that the sum
hides it. So the parts are computed once more with cross-entropies of zero, where the loss is that
term, and are compared relative to it. Untrained routers are nearly balanced, and then the term is
nearly the same for any samples: it is compared with other weights too.
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
    """What a loss was divided by."""

    divisor: str  # none (a sum), targets or samples
    ignored: int | None = None  # the target that it ignores; None: not known
    shift: int = 0  # how many targets at the start of a sequence it does not read

    def count(self, targets: Tensor | None, samples: int) -> int:
        """The divisor, of ``targets`` [n, ...] of so many samples."""
        if self.divisor == "none":
            return 1
        if self.divisor == "samples" or targets is None:
            return samples
        read = targets[:, self.shift :] if targets.ndim > 1 else targets
        return int((read != (IGNORED if self.ignored is None else self.ignored)).sum())


class CrossEntropyCalls(TorchFunctionMode):
    """Sees the calls of torch's cross-entropy inside. With ``omits`` they return zeros."""

    def __init__(self, omits: bool = False) -> None:
        super().__init__()
        self._omits = omits
        self.ignored: set[int] = set()  # the targets that they ignore
        self.counts: set[int] = set()  # how many they do not ignore

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


# (targets, rows) -> the loss of these rows, None where the model gives logits
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
    """See [Note: a mean that a model returns]; None for a model that gives logits.

    Args:
        targets: of `SAMPLES` samples.
        ignored: the target that the loss is known to ignore.
        is_declared: the loss is a mean per micro-batch, so nothing must add up.
        bound: the largest relative error of the computation.
        other_weights: a context in which the model has other weights.

    Raises:
        ConfigError: the loss does not add up.
    """
    has_classes = targets is not None and not targets.is_floating_point()
    if has_classes:
        assert targets is not None
        targets = targets.clamp(min=0)  # all are valid
    with CrossEntropyCalls() as calls:
        value = run(targets, slice(None))
    if value is None:
        return None
    # Models of transformers compute their loss in fp32, whatever the logits are in.
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
    """True if the loss has a term next to the cross-entropy, or is something else. Raises
    `ConfigError` where it does not add up."""
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
    """The loss of the whole from those of the parts."""
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
    """The rule by which the losses of the parts add up to that of the whole."""
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
        # Zeros would be anything.
        if losses[0] and abs(expected - losses[0]) <= bound * abs(losses[0]):
            return rule
    raise ConfigError(_refusal(losses, _counts(rules[1], targets), bound))


def _candidates(
    targets: Tensor | None, ignored: int | None, counts_classes: bool, seen: list[list[int]]
) -> list[LossRule]:
    rules = [LossRule("none", ignored)]
    # What cross-entropy was seen to count; a function that calls none has been told what to ignore.
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
        what = "no number that shows what it was divided by"
    elif abs((first + rest) / 2 - whole) <= bound * abs(whole):
        what = "a mean per micro-batch, whatever is in it, and so depends on the layout"
    return (
        f"{called} of {SAMPLES} samples is {whole:.7g}, of the first of them {first:.7g} and of "
        f"the others {rest:.7g}, with {counts[1]} and {counts[2]} valid targets: it is {what}; "
        "give train.loss a function of the output that adds up, or accept that with "
        "train.loss_is=mean_per_micro_batch"
    )
