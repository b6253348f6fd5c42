"""Attention over sequences that are split over the context axis.

Each rank holds a slice of the positions. For attention the rank exchanges slices with the other
ranks in one of two ways. Either the rank gets all positions for some of the heads (an all-to-all,
as in Ulysses), or the rank all-gathers the keys and values and uses only the queries of its slice.
Query, key and value are [batch, heads, slice, dim]. Masks broadcast to [batch, heads, queries,
keys], where the queries are all positions or this rank's slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from parallel2d.base.errors import ConfigError
from parallel2d.models.attention import grouped_attention
from parallel2d.parallel.context_axis import ContextAxis
from parallel2d.parallel.fsdp_internals.sharded_model import saving_hooks
from parallel2d.parallel.fsdp_internals.tensors import storage_of


def attend_to_slices(
    axis: ContextAxis,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attend to keys and values that are split over the context axis by position.

    Args:
        axis: the context axis.
        name: name of the block, for errors.
        query: this rank's slice.
        key: this rank's slice.
        value: this rank's slice.
        mask: its queries are all positions or this rank's slice.
        options: further arguments of ``F.scaled_dot_product_attention``.

    Raises:
        ConfigError: ``mask`` covers only the keys of this rank's slice.
    """
    ranks, heads = axis.size, (query.shape[1], key.shape[1])
    gathers = bool(heads[0] % ranks or heads[1] % ranks)
    if mask is not None:
        mask = _all_columns(axis, name, mask, query.shape[2], key.shape[2])
    elif options["is_causal"]:
        # Each rank gets all positions of one key head, which all its query heads use. An all-gather
        # of keys would be slower for causal attention: the last rank would compute most, and some
        # devices would need a mask tensor.
        if heads[0] % ranks == 0 and heads[1] < ranks and ranks % heads[1] == 0:
            copies = ranks // heads[1]
            with _gathered_again(
                lambda own: axis.heads_of_all(own.repeat_interleave(copies, 1)), key, value
            ) as (every_key, every_value):
                output = grouped_attention(
                    axis.heads_of_all(query), every_key, every_value, **options
                )
            return axis.slices_of_all(output)
    else:
        gathers = gathers or _gather_is_cheaper(heads, ranks)
    if gathers:
        join = functools.partial(axis.join, dim=2)
        with _gathered_again(join, key, value) as (every_key, every_value):
            return attend_to_all(axis, query, every_key, every_value, mask, options)
    if mask is not None:
        mask = _of_own_heads(axis, mask, query.shape[2])
    query, key, value = map(axis.heads_of_all, (query, key, value))
    return axis.slices_of_all(grouped_attention(query, key, value, attn_mask=mask, **options))


def _of_own_heads(axis: ContextAxis, mask: Tensor, own: int) -> Tensor:
    if mask.shape[-2] == own:
        mask = axis.join_mask(mask, -2)
    of_heads = mask.ndim - 3
    if mask.ndim > 2 and mask.shape[of_heads] > 1:
        mask = axis.cut(mask, of_heads)
    return mask


def attend_to_all(
    axis: ContextAxis,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attend from this rank's queries to keys and values that cover all positions."""
    own = query.shape[2]
    if mask is not None and mask.shape[-2] not in (1, own):
        mask = axis.cut(mask, mask.ndim - 2)
    if options["is_causal"]:
        first, options = axis.rank * own, {**options, "is_causal": False}
        # Drop the keys after this rank's last position. Compiled code uses all keys, because its
        # shapes must not depend on the rank ([Note: equal graphs]).
        if not torch.compiler.is_compiling():
            key, value = key[:, :, : first + own], value[:, :, : first + own]
        mask = _causal(mask, query, key, first)
    return grouped_attention(query, key, value, attn_mask=mask, **options)


def _causal(mask: Tensor | None, query: Tensor, key: Tensor, first: int) -> Tensor:
    """Return ``mask`` combined with the causal mask. ``first``: position of the first query."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and keys == first + queries and not torch.compiler.is_compiling():
        # `causal_lower_right` returns a tensor subclass, which the dispatch modes of selective
        # activation checkpointing cannot create.
        with _disable_current_modes():
            return causal_lower_right(queries, keys)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(first)
    if mask is None:
        return seen
    mask = mask[..., :keys]
    return mask & seen if mask.dtype == torch.bool else mask.where(seen, -torch.inf)


def _gather_is_cheaper(heads: tuple[int, int], ranks: int) -> bool:
    """True if an all-gather of keys and values sends fewer bytes than the all-to-all of heads.

    The estimate includes the second all-gather in backward.
    """
    served = heads[0] / heads[1]
    return 6 / served < 4 / ranks * (1 + 1 / served)


def _all_columns(axis: ContextAxis, name: str, mask: Tensor, own: int, keys: int) -> Tensor:
    """Return ``mask`` with a column for each position of the full sequence."""
    if mask.shape[-1] in (1, keys * axis.size):
        return mask
    if mask.shape[-1] == keys and mask.shape[-2] == 1:
        return axis.join_mask(mask, -1)
    raise ConfigError(
        f"mesh.context={axis.size}: {name} computes a mask of shape {tuple(mask.shape)} from "
        f"its slice of {own} positions; compute it before the blocks, from the full sequence"
    )


def _gathered_again(
    gather: Callable[[Tensor], Tensor], *slices: Tensor
) -> AbstractContextManager[list[Tensor]]:
    """Return a context manager that yields ``gather(slice)`` for each slice.

    Inside the context autograd saves the slices in the place of the gathered tensors, and backward
    calls ``gather`` again. In two cases autograd saves tensors as usual: under activation
    checkpointing, because the recomputation repeats the gather, and in compiled code, because the
    compiler chooses the saved tensors.
    """
    gathered = [gather(each) for each in slices]
    if torch.compiler.is_compiling() or saving_hooks() is not None:
        return nullcontext(gathered)
    return _saving_slices(gather, gathered, slices)


@contextmanager
def _saving_slices(
    gather: Callable[[Tensor], Tensor], gathered: list[Tensor], slices: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    pairs = zip(gathered, slices, strict=True)
    own_of = {storage_of(whole): own.detach() for whole, own in pairs}

    def pack(tensor: Tensor) -> Any:
        own = own_of.get(storage_of(tensor))
        if own is None:
            return tensor
        return own, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        own, *geometry = saved
        # The saved strides refer to the storage of the gathered tensor.
        return gather(own).as_strided(*geometry)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield gathered
