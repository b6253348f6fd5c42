"""`LossesInFP32`: fp32 losses for models that compute in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_LOSSES = {
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss,
    F.cross_entropy, F.ctc_loss, F.gaussian_nll_loss, F.hinge_embedding_loss, F.huber_loss,
    F.kl_div, F.l1_loss, F.margin_ranking_loss, F.mse_loss, F.multi_margin_loss,
    F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.nll_loss, F.poisson_nll_loss,
    F.smooth_l1_loss, F.soft_margin_loss, F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
    # Functions that hand-written cross-entropies call
    F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.logsumexp, Tensor.logsumexp,
}  # fmt: skip


class LossesInFP32(TorchFunctionMode):
    """Computes losses of 16-bit arguments in fp32, as `torch.autocast` does.

    Autocast itself is not used, because it would also cast the inputs of `precision.fp32_modules`,
    which must stay in fp32.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Compiled blocks contain no losses.
        if not torch.compiler.is_compiling() and function in _LOSSES:
            args, kwargs = tree_map_only(Tensor, widened, (args, kwargs))
        return function(*args, **kwargs)


def widened(value: Tensor) -> Tensor:
    """Return ``value`` in fp32 if it has fewer bits."""
    return value.float() if value.is_floating_point() and value.itemsize < 4 else value
