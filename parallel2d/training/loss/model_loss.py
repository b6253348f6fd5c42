"""`ModelLoss` calls a model with a batch, and converts the output to a summed loss."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from parallel2d.base.config import TrainConfig
from parallel2d.base.config.options import load_reference
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import broadcast
from parallel2d.parallel.chunked_head import ChunkedHead
from parallel2d.parallel.context_axis import context_axis_of
from parallel2d.parallel.loss import cross_entropy_sum, loss_bound
from parallel2d.parallel.parallelize.layout import SampleShape
from parallel2d.parallel.parallelize.precision import DTYPES
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.parallel.weights.named_tensors import equal, undisturbed
from parallel2d.training.data.batch import IGNORED, Batch
from parallel2d.training.data.custom_data import TARGET_NAMES
from parallel2d.training.data.stream import SampleStream
from parallel2d.training.loss.losses_in_fp32 import LossesInFP32, widened
from parallel2d.training.loss.rule import SAMPLES, LossRule, find_rule
from parallel2d.training.model_families import ModelParts

log = logging.getLogger(__name__)

_INPUT_NAMES = ("idx", "input_ids", "inputs", "tokens", "x", "pixel_values")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ModelLoss:
    """The loss of a model: its own loss, ``train.loss``, or the cross-entropy of its logits.

    Call `learn` before the first loss.

    Args:
        config: the configuration of the job.
        parts: the model and its facts, before parallelization.

    Raises `ConfigError` for a forward with several parameters for targets, and for settings that
    have no effect if the model computes its own loss.
    """

    def __init__(self, config: TrainConfig, parts: ModelParts) -> None:
        self._config = config
        self._function = cross_entropy_sum
        if config.train.loss is not None:
            self._function = load_reference("train.loss", config.train.loss)
        self._context = parts.context
        self._kind = type(parts.module).__name__
        if type(parts.module).forward is nn.Module.forward:
            raise ConfigError(
                f"{self._kind} has no forward, which training calls (not a training_step): write "
                "one, or give model.target a function that returns the module inside"
            )
        self._signature = inspect.signature(parts.module.forward)
        parameters = self._signature.parameters
        reads_tokens = not config.data.has_own_samples
        # Models of these libraries return logits if they get no labels. For token ids, the loss is
        # then computed here.
        library = type(parts.module).__module__.startswith(("transformers.", "peft."))
        self._targets = None
        if not (reads_tokens and library):
            self._targets = self._target_name(parameters)
        self._aligns = reads_tokens and self._targets == "labels"
        self._positions = []
        for name, each in parameters.items():
            if each.kind in _BY_POSITION and name not in TARGET_NAMES:
                self._positions.append(name)
        train = config.train
        for key, value in (("loss_chunk", train.loss_chunk), ("z_loss", train.z_loss)):
            if value and self._targets:
                raise ConfigError(
                    f"train.{key}={value}: {self._kind} takes {self._targets} and computes its own "
                    f"loss, which ignores this key; omit train.{key}"
                )
        # True for 16-bit computation, in which losses are nevertheless computed in fp32
        self._is_narrow = DTYPES[config.precision.param].itemsize < 4
        self._rule: LossRule | None = None  # rule of a custom loss; None: the loss is a sum
        self.chunked_head: ChunkedHead | None = None  # if set, computes logits and loss in chunks

    def _target_name(self, parameters: Container[str]) -> str | None:
        targets = list(filter(parameters.__contains__, TARGET_NAMES))
        if len(targets) > 1:
            listed = " and ".join(targets)
            raise ConfigError(f"{self._kind}.forward takes {listed}: which are the targets?")
        return targets[0] if targets else None

    def check(self, sample: SampleShape) -> None:
        """Raise `ConfigError` if the model's forward does not accept batches of samples with this
        shape."""
        args, named = self.arguments(sample.inputs, sample.targets)
        try:
            self._signature.bind(*args, **named)
        except TypeError as error:
            raise ConfigError(
                f"{self._kind}.forward{self._signature} does not take a batch of "
                f"data={self._config.data.name}, {len(args)} tensors and {list(named)} by name: "
                f"{error}; data=custom passes the values of a dict by the names of its parameters"
            ) from None

    def arguments(
        self, inputs: Any, targets: Any, document_ids: Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the model's forward: the inputs of a dict by name, other inputs
        by position or by the name of a parameter."""
        named = self._named(inputs, targets)
        if isinstance(inputs, Mapping):
            return (), {**named, **inputs}
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        if document_ids is not None:
            values = (*values, document_ids)
        names = self._positions
        # A single input goes to a parameter with a usual name of inputs, wherever this parameter is
        # in the signature.
        known = list(filter(names.__contains__, _INPUT_NAMES))
        if len(values) == 1 and known:
            names = known
        first = list(self._signature.parameters)[: len(values)]
        if len(names) < len(values) or names[: len(values)] == first:
            return values, named
        return (), {**dict(zip(names, values, strict=False)), **named}

    def _named(self, inputs: Any, targets: Any) -> dict[str, Any]:
        # If the inputs fill all parameters, the parameter that is named like targets receives an
        # input.
        is_full = isinstance(inputs, tuple) and len(inputs) == len(self._signature.parameters)
        if self._targets is None or targets is None or is_full:
            return {}
        return {self._targets: targets}

    def value(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        """Return the loss of a micro-batch as the model computes it. No divisor is applied."""
        return self._value(model, inputs, targets)[0]

    def _value(
        self, model: nn.Module, inputs: Any, targets: Any, document_ids: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        """Return a loss, and True if this loss is custom. A custom loss comes from the model or
        from ``train.loss``, and may be a sum or a mean. Otherwise the loss is the summed
        cross-entropy of the logits."""
        args, named = self.arguments(inputs, targets, document_ids)
        # A model computes its own loss only if it takes the targets, or if the data have no
        # targets.
        is_own = self._targets is not None or targets is None
        with LossesInFP32() if self._is_narrow and is_own else nullcontext():
            output = model(*args, **named)
        train = self._config.train
        if targets is not None and targets.ndim > 1:
            targets = targets[:, self._context(targets.shape[1]) :]
        if train.loss is not None:
            if self._is_narrow:
                output = tree_map_only(Tensor, widened, output)
            return self._function(output, targets), True
        found = _loss_in(output)
        if found is not None:
            return found, True
        options = {"z_loss": train.z_loss} if train.z_loss and model.training else {}
        logits = logits_in(output)
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"{self._kind} returned {type(output).__name__}, which contains neither a loss "
                "nor logits; compute a loss from it with train.loss=package.module:function"
            )
        return self._function(logits, targets, **options), False

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss of a batch. If the loss is a mean, it is multiplied by
        ``batch.valid_tokens``. Raises `ConfigError` if the model returns a loss although it does
        not take targets."""
        head = self.chunked_head
        if head is not None and model is head.model:
            args, named = self.arguments(batch.inputs, batch.targets, batch.document_ids)
            assert batch.targets is not None, "logits have targets"
            value, is_own = head.loss(batch.targets, *args, **named), False
        else:
            value, is_own = self._value(model, batch.inputs, batch.targets, batch.document_ids)
        if not is_own:
            # At positions without a sample, custom data sets repeat another sample, whose loss must
            # not count.
            return value if batch.valid_tokens else value * 0
        if self._rule is None:
            raise ConfigError(
                f"{self._kind} returned a loss, and takes no targets: name them in its forward as "
                f"one of {', '.join(TARGET_NAMES)}, return batches without targets from "
                "data=custom, or give train.loss a function of its output"
            )
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        if self._rule.divisor == "none" and batch.valid_tokens:
            return wide
        return wide * batch.valid_tokens

    def compare_head(self, model: nn.Module, batch: Batch) -> None:
        """Run the checks that need a forward, before the first step. With a chunked loss, compare
        it with the loss of the unchunked logits. With a context axis, run the first forward, which
        compares the model on slices of sequences with the model on full sequences. Collective.
        """
        if self.chunked_head is not None:
            assert batch.targets is not None, "logits have targets"
            args, named = self.arguments(batch.inputs, batch.targets, batch.document_ids)
            self.chunked_head.compare(batch.targets, *args, **named)
        elif context_axis_of(model) is not None:
            with undisturbed(model):
                self._value(model, batch.inputs, batch.targets, batch.document_ids)

    def prepare(self, batch: Batch) -> Batch:
        """Return ``batch`` in the form that the loss expects: ignored targets have the value that
        the loss ignores, and ``valid_tokens`` is the divisor. Raises `ConfigError` for ignored
        targets that the loss would count."""
        rule, targets = self._rule, batch.targets
        if rule is None or targets is None or targets.is_floating_point():
            return batch
        if rule.divisor == "samples":
            if bool((targets == IGNORED).any()):
                raise ConfigError(
                    f"{self._kind}: a batch has targets that are not valid, and the loss is a mean "
                    "over all of them; give train.loss a function that omits them"
                )
            return dataclasses.replace(batch, valid_tokens=batch.valid_tokens and len(targets))
        if self._aligns and rule.shift:
            # A model that shifts labels internally expects the token of each position as its label,
            # not the next token.
            first = torch.full_like(targets[:, :1], IGNORED)
            targets = torch.cat([first, targets[:, :-1]], dim=1)
        if rule.ignored is not None:
            targets = targets.masked_fill(targets == IGNORED, rule.ignored)
        if rule.divisor == "none":
            return dataclasses.replace(batch, targets=targets)
        counted = self._counted(batch, targets)
        # A sample at a position without data has weight zero.
        return counted if batch.valid_tokens else dataclasses.replace(counted, valid_tokens=0)

    def without_first(self, batch: Batch, share: float) -> Batch:
        """Return the prepared ``batch`` with the first targets of each sequence ignored. ``share``:
        the fraction of ignored targets. If the loss cannot ignore targets, the batch is
        unchanged."""
        rule, targets = self._rule or LossRule("targets", IGNORED), batch.targets
        if targets is None or rule.divisor == "samples" or rule.ignored is None:
            return batch
        targets = targets.clone()
        targets[..., : round(targets.shape[-1] * share)] = rule.ignored
        return self._counted(batch, targets)

    def _counted(self, batch: Batch, targets: Tensor) -> Batch:
        rule = self._rule or LossRule("targets", IGNORED)
        valid = dataclasses.replace(rule, divisor="targets").count(targets, len(targets))
        if not valid and self._rule is not None and rule.divisor == "targets":
            # A mean over no targets is NaN. Therefore one target is set to a valid value; its
            # weight is zero.
            targets = targets.clone()
            targets.view(-1)[-1] = int(rule.ignored == 0)
        return dataclasses.replace(batch, targets=targets, valid_tokens=valid)

    def learn(self, model: nn.Module, stream: SampleStream, device: torch.device) -> None:
        """Find the divisor of the loss in eval mode.

        Args:
            model: the parallel model.
            stream: the samples, before `prepare` is applied to batches.
            device: device of the model.

        Raises `ConfigError` for a loss that depends on the layout, unless ``train.loss_is``
        declares this. Collective.
        """
        train = self._config.train
        rule = None
        # All other models return logits. For these the forward is skipped, because the logits may
        # not fit in memory.
        if self._targets or train.loss or stream.shape.targets is None:
            batch = stream.read([at % (len(stream) or SAMPLES) for at in range(SAMPLES)]).to(device)
            if not self._config.data.has_own_samples:
                # The samples must differ as much as possible, so one sample repeats a single token.
                batch.inputs[0] = batch.inputs[0, 0].clone()

            def run(targets: Tensor | None, rows: slice) -> Tensor | None:
                given = (batch.inputs, targets, batch.document_ids)
                part = tree_map_only(Tensor, lambda each: each[rows] if each.ndim else each, given)
                value, is_own = self._value(model, *part)
                return self._scalar(value) if is_own else None

            with undisturbed(model), torch.compiler.set_stance("force_eager"):
                rule = find_rule(
                    run,
                    batch.targets,
                    ignored=None if train.loss is None else IGNORED,
                    is_declared=train.loss_is != "auto",
                    bound=loss_bound(DTYPES[self._config.precision.param]),
                    other_weights=functools.partial(_other_weights, model),
                )
        if rule is None and train.loss_is != "auto":
            raise ConfigError(
                f"train.loss_is={train.loss_is} has no effect: {self._kind} gives logits, whose "
                "cross-entropy is summed over valid targets"
            )
        if rule is not None and train.z_loss:
            raise ConfigError(
                f"train.z_loss={train.z_loss}: {self._kind} computes its own loss, to which this "
                "is not added; omit train.z_loss"
            )
        if rule is not None:
            log.info("the loss of %s is divided by: %s", train.loss or self._kind, rule)
        # Rounding errors may change a comparison near its bound, so that ranks could find different
        # rules and scale their gradients differently. Therefore every rank uses the rule of rank 0.
        self._rule = broadcast(rule)

    def _scalar(self, value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if value.ndim:
            raise ConfigError(
                f"{self._kind}: the loss has shape {tuple(value.shape)}, and must be a scalar"
            )
        if value.dtype.itemsize < 4:
            raise ConfigError(
                f"{self._kind}: the loss is computed in {value.dtype}, which rounds it by up to "
                f"{torch.finfo(value.dtype).eps / 2:.1%}: compute it from output.float(), or "
                "return the output and give train.loss a function of it, which gets it in fp32"
            )
        return value


@contextmanager
def _other_weights(model: nn.Module) -> Iterator[None]:
    """Inside the context, add values to the matrices of ``model`` that have about the size of
    untrained weights. The values are a fixed function of the index in the local shard. Needs memory
    for two copies of the matrices."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.is_floating_point():
            part = local_part(parameter.detach())
            waves = torch.arange(part.numel(), device=part.device, dtype=torch.float32).cos_()
            shift = waves.view(part.shape) / parameter.shape[-1] ** 0.5
            pairs.append((part, part + shift.to(part.dtype)))
    with equal(pairs):
        yield


def _loss_in(output: Any) -> Tensor | None:
    """Return the loss in a model's output: a scalar, the scalar in a tuple, or the entry ``loss``.
    Return None if the output has no loss. Raises `ConfigError` for several scalars."""
    if isinstance(output, Mapping):
        found: Tensor | None = output.get("loss")
        return found
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        scalars = []
        for each in output:
            if isinstance(each, Tensor) and each.ndim == 0:
                scalars.append(each)
        if len(scalars) > 1:
            raise ConfigError(
                f"the model returned {len(scalars)} scalars: which is the loss? Give train.loss a "
                "function of the output"
            )
        return scalars[0] if scalars else None
    return getattr(output, "loss", None)


def logits_in(output: Any) -> Any:
    """Return the logits in a model's output: the tensor itself, the entry ``logits``, or the first
    element of a tuple."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    if isinstance(output, tuple | list) and not hasattr(output, "logits"):
        return output[0] if output else output
    return getattr(output, "logits", output)
