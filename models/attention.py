"""Grouped-query attention where the fused kernels of a device want as many heads of keys as of
queries."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """``F.scaled_dot_product_attention`` with a fused kernel.

    Args:
        query: [batch, heads, queries, dim].
        key, value: [batch, heads, keys, dim]; with ``enable_gqa`` they may have fewer heads.
        attn_mask: broadcasts to [batch, heads, queries, keys].
        options: further arguments of ``F.scaled_dot_product_attention``.

    Of the fused kernels on accelerators, flash attention takes fewer heads of keys, in half
    precision and without a mask. For other calls torch would choose the math kernel, which keeps
    all [queries, keys] scores; keys and values are repeated for each query head then.
    """
    tensors = (query, key, value)
    # A function mode sees one call. The mode of a context axis exchanges the fewer heads.
    if has_torch_function(tensors):
        given = {"attn_mask": attn_mask, **options}
        return handle_torch_function(grouped_attention, tensors, *tensors, **given)
    if options.get("enable_gqa") and key.shape[1] != query.shape[1]:
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        if query.device.type not in ("cpu", "meta") and (attn_mask is not None or not is_half):
            copies = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
            options["enable_gqa"] = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
