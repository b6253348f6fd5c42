"""Grouped-query attention: `grouped_attention`.

Some fused kernels need as many key heads as query heads. Only for these kernels, key and value
heads are repeated.
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

    On accelerators, only one fused kernel supports fewer key heads than query heads: flash
    attention, in half precision and without a mask. For other calls torch would choose the math
    kernel, which stores all [queries, keys] scores. Therefore these calls repeat keys and values
    for each query head.

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, heads, keys, dim]; with ``enable_gqa`` it may have fewer heads.
        value: shaped like ``key``.
        attn_mask: broadcasts to [batch, heads, queries, keys].
        options: further arguments of ``F.scaled_dot_product_attention``.
    """
    tensors = (query, key, value)
    # With a context axis, a function mode intercepts this call. It must get the unrepeated heads,
    # because it exchanges them between ranks.
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
