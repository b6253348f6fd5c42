"""`embedding_errors_named`: an error message with the name of the embedding, if a token id exceeds
its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from parallel2d.base.errors import ConfigError


@contextlib.contextmanager
def embedding_errors_named(model: nn.Module) -> Iterator[None]:
    """Context for the steps of ``model``: convert the IndexError of an `nn.Embedding` to a
    `ConfigError` with the name of the embedding. The context has no effect on a GPU, where an
    assertion in the kernel ends the process."""
    try:
        yield
    except IndexError as error:
        named = _explained(error, model)
        if named is None:
            raise
        raise named from None


def _explained(error: BaseException, model: nn.Module) -> ConfigError | None:
    trace = error.__traceback__
    while trace is not None:
        found = trace.tb_frame.f_locals
        module, ids = found.get("self"), found.get("input")
        if isinstance(module, nn.Embedding) and torch.is_tensor(ids) and ids.numel():
            names = {}
            for name, each in model.named_modules():
                names[each] = name
            return ConfigError(
                f"{names.get(module, type(module).__name__)} has {module.num_embeddings} rows and "
                f"was given the ids {int(ids.min())} to {int(ids.max())}: a model needs a row for "
                "each token id of its data, and one for each of train.seq_len positions"
            )
        trace = trace.tb_next
    return None
