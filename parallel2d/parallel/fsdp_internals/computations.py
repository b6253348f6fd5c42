"""Computations that sharded parameters cannot take part in, of which torch's own errors speak of
neither parameters nor modules."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_leaves

from parallel2d.parallel.fsdp_internals.group_watch import storage_of


def is_differentiated_forward(inputs: Any, frees: bool) -> bool:
    """Whether ``inputs`` of a module carry a forward-mode derivative that would be lost in the
    hooks of `fully_shard`, or whose backward pass would find no parameters where the module
    ``frees`` them after forward. torch has no public name for whether there are any."""
    if forward_ad._current_level < 0 or not torch.is_grad_enabled():
        return False
    # torch.func.jvp uses the same numbers, and its backward pass goes through the hooks.
    if torch._C._functorch.maybe_current_level() is not None:
        return False
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    duals = [each for each in tensors if forward_ad.unpack_dual(each).tangent is not None]
    return any(frees or each.requires_grad for each in duals)


# Operators of torch.ops.aten in which people mix parameters with tensors of their own
_MIXING = """
    add sub mul div pow maximum minimum eq ne lt le gt ge add_ sub_ mul_ div_ lerp lerp_ copy_
    mm mv bmm dot addmm addmv baddbmm convolution cat stack where index embedding equal allclose
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    native_layer_norm mkldnn_rnn_layer _foreach_add
    _foreach_add_ _foreach_sub _foreach_sub_ _foreach_mul
    _foreach_mul_ _foreach_lerp_ _foreach_copy_
    zero_ fill_ clamp_ masked_fill_ index_put_ index_fill_ renorm_ normal_ uniform_
"""
_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
_WHOLE = (
    "change whole values with parallel2d.apply_full(model, function), or inside "
    "parallel2d.summon_full_params(model, writeback=True, with_grads=True)"
)
_UNSUPPORTED = re.compile("sharding strategy registered|require placement changes")

# Operators by which scripts make tensors of their own, such as a first hidden state, on the device
# and in the dtype of a parameter
_MAKING = ("new_empty", "new_full", "new_ones", "new_zeros")

# Those of `explain_mixed_tensors`, once it has run
_handlers: dict[Any, Any] = {}

# An attribute of the parameters of a sharded model, and of those they have replaced: the name
SHARDED_AS = "_parallel2d_sharded_as"


class MixedTensorsError(RuntimeError):
    """A plain tensor met a sharded one."""


@functools.cache
def explain_mixed_tensors() -> None:
    """Replaces torch's error for operators that get a `DTensor` and a plain tensor, in this
    process, and lets sharded parameters make plain tensors of another size. C++ offers this table
    of handlers by operator alone."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    explained: dict[Any, Any] = {}
    for name in _MIXING.split():
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            explained[getattr(packet, overload)] = _explained
    for name in _MAKING:
        explained[getattr(torch.ops.aten, name).default] = _made_plain
    # Torch has handlers of its own for some.
    for operator in explained.keys() & handlers.keys():
        del explained[operator]

    handlers.update(explained)
    _handlers.update(explained)


@contextmanager
def without_explanations(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A handler takes microseconds, and torch's optimizers, which mix nothing, run thousands."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    rests = type(optimizer).__module__.startswith("torch.optim.")
    for operator in _handlers if rests else ():
        handlers.pop(operator, None)
    try:
        yield
    finally:
        handlers.update(_handlers)


def _explained(operator: Any, args: Any, kwargs: Any) -> Any:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    written = args[0]
    if operator.name().partition(".")[0].endswith("_") and isinstance(written, DTensor):
        base = written._base
        # A view that needed other ranks' parts is a copy: what is written there is lost.
        if isinstance(base, DTensor) and storage_of(written) != storage_of(base):
            raise RuntimeError(f"{operator} writes to rows or columns of a DTensor: {_WHOLE}")
        if operator in _RANDOM and any(map(Placement.is_shard, written.placements)):
            raise RuntimeError(f"{operator} would draw all parts of a DTensor alike: {_WHOLE}")
    # Without the handler the call is what it would have been.
    handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    except RuntimeError as error:
        if _UNSUPPORTED.search(str(error)):
            raise RuntimeError(f"{operator} cannot be computed on a DTensor: {_WHOLE}") from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise MixedTensorsError(
            f"{operator} got a plain tensor and a sharded parameter, which is whole only while the "
            "block that gathers it runs: elsewhere use parameter.full_tensor(), and let a block "
            "return, or get as an argument, the weight that another one needs"
        ) from error
    finally:
        handlers[operator] = _explained


def _made_plain(operator: Any, args: Any, kwargs: Any) -> Any:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    if hasattr(args[0], SHARDED_AS):
        return operator(args[0]._local_tensor, *args[1:], **kwargs)
    handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = _made_plain
