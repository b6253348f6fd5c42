"""The loss of one micro-batch as training computes it, for models on tensors without storage:
`step_loss`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallel2d.assemble import name_of_head
from parallel2d.chunked_head import ChunkedHead
from parallel2d.config import TrainConfig
from parallel2d.model_families import ModelParts

StepLoss = Callable[[Tensor, Tensor], Tensor]  # of inputs and targets


def step_loss(
    config: TrainConfig, parts: ModelParts, model: nn.Module, inputs: Tensor, targets: Tensor
) -> StepLoss:
    """``model``: a copy of ``parts.module``, whole or parallel. With ``train.loss_chunk`` it
    computes ``inputs`` once, to learn what it does with its logits.

    Raises `ConfigError` for a model whose loss cannot be computed in chunks.
    """
    head = name_of_head(config, parts)
    if head is None or config.train.loss_chunk is None:
        return lambda inputs, targets: parts.loss(model(inputs), targets)
    chunked = ChunkedHead(model, config.train.loss_chunk, head)
    with torch.no_grad():
        chunked.record(targets, inputs)
    return lambda inputs, targets: chunked.loss(targets, inputs)
