"""Grouped-query attention: `grouped_attention`.

Some fused kernels need as many key heads as query heads; heads are repeated only for these.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Run ``F.scaled_dot_product_attention`` with a fused kernel.

    Of the fused kernels on accelerators, only flash attention supports fewer key heads than query
    heads, in half precision and without a mask. For other calls torch would choose the math kernel,
    which keeps all [queries, keys] scores. In these calls keys and values are repeated for each
    query head.

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, heads, keys, dim]; with ``enable_gqa`` it may have fewer heads.
        value: shaped like ``key``.
        attn_mask: broadcasts to [batch, heads, queries, keys].
        options: further arguments of ``F.scaled_dot_product_attention``.
    """
    tensors = (query, key, value)
    # A function mode intercepts one call, so the mode of a context axis exchanges the unrepeated
    # heads.
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
