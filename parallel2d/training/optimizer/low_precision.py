"""`low_precision_optimizer`: AdamW, Adam and SGD that store their state in bf16 or int8.

[Note: codes of optimizer state] A *code* is a stored bf16 or int8 value. A step decodes a piece of
the state, updates the state and the parameter in fp32 (fp64 for fp64 parameters), and rounds the
state to codes again. Rounding is stochastic, so that the expected value of the result is the exact
value. With rounding to the nearest code, a moment with a decay near 1 could stay constant, because
one step changes it by less than half of the distance between two codes.

The random numbers depend only on the seed, the name of the parameter, its number of updates, and
the position of a value in the unsharded parameter. Blocks are parts of the rows of the unsharded
parameter ([Note: blocks of rows] in `geometry.py`). Therefore the codes are the same on every
layout.

In int8, each block of values has one scale: the largest magnitude in the block. The first moment
has 127 codes per sign; a code stands for (code / 127)**4 of the scale. The second moment has 255
codes; a code stands for (code / 255)**8 of the scale. The update divides by the square root of the
second moment, which therefore also follows a fourth power. The relative distance between adjacent
codes is 3 % for values near the scale, 10 % at 1/100 of the scale, and 30 % at 1/10,000, so that
small values of a block do not become zero. A second moment above zero gets at least the code 1,
because the update divides by the root of this moment. The powers and roots are computed only by
products and square roots, which every device rounds correctly (IEEE 754). Therefore the codes are
bitwise equal on all devices.

Parameters with fewer than two dims (norms, biases) keep their state in the dtype of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel2d.base.config import OptimizerConfig
from parallel2d.base.device import sent_to
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.sync.formats.quantize import key_of, uniform
from parallel2d.parallel.weights.geometry import (
    Region,
    block_length,
    local_part,
    local_region,
    scales_like,
    scales_region,
)
from parallel2d.parallel.weights.unsharded_tensors import copy_part

# Number of values in a piece, which is updated at one time. On a CPU a piece fits into the cache.
_PIECE, _PIECE_ON_CPU = 2**22, 2**16


class Moment(NamedTuple):
    """A state tensor of each parameter, such as the first moment of Adam."""

    key: str
    is_signed: bool

    @property
    def scale_key(self) -> str:
        """Key of the scales of its blocks."""
        return f"{self.key}_scale"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its codes."""
        return torch.int8 if self.is_signed else torch.uint8

    @property
    def largest(self) -> int:
        """The largest code."""
        return 127 if self.is_signed else 255

    def power(self, shares: Tensor) -> Tensor:
        """Return the values of codes in units of the scale. ``shares``: the codes divided by
        `largest`."""
        powers = shares.square().square_()
        return powers if self.is_signed else powers.square_()

    def encode(self, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of blocks, and the scale of each block in fp32.

        ``values`` and ``noise`` have the shape [..., block size]. ``noise``: random numbers in [0,
        1).
        """
        scale = values.abs().amax(-1, keepdim=True).to(torch.float32)
        shares = values.abs().div_(torch.where(scale == 0, 1, scale))
        roots = shares.sqrt().sqrt_()
        if not self.is_signed:
            roots.sqrt_()
        codes = roots.mul_(self.largest).floor_().clamp_(max=self.largest - 1)
        lower = self.power(codes / self.largest)
        upper = self.power((codes + 1) / self.largest)
        # Take the next code with the probability for which the expected value is exact
        codes += noise.mul(upper.sub_(lower)) < shares.sub(lower)
        if not self.is_signed:
            codes = torch.maximum(codes, shares > 0)
        return codes.copysign_(values).to(self.dtype), scale.squeeze(-1)

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of codes [..., block size] in ``dtype``."""
        shares = codes.to(dtype).div_(self.largest)
        return self.power(shares).mul_(scale.to(dtype)[..., None]).copysign_(shares)


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Return ``values`` in bf16, rounded stochastically, so that the expected value is exact."""
    # A bf16 number is the upper half of an fp32 number. Random bits that are added to the lower
    # half carry into the upper half with the right probability.
    bits = values.to(torch.float32, copy=True).view(torch.int32)
    bits += noise.mul(2.0**16).to(torch.int32)
    return bits.bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)


class _Blocks(NamedTuple):
    """A rectangle of blocks in this rank's local shard, as indices into the shard viewed as [rows,
    columns]."""

    rows: slice
    blocks: slice
    columns: slice
    block: int
    # Positions of the values in the unsharded parameter, int32
    positions: Tensor


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers with low-precision state. These optimizers need no
    communication.

    Args:
        groups: parameter groups, as `optimizer.plan_groups` returns them.
        names: the FQN of each parameter.
        config: the ``optimizer`` section, with ``state_dtype`` bf16 or int8.
        seed: seed of stochastic rounding.

    Raises `ConfigError` if the mesh splits a block of a parameter, or if a parameter is not
    contiguous or has no floating-point dtype.
    """

    moments: Sequence[Moment] = ()

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[Tensor, str],
        config: OptimizerConfig,
        seed: int,
    ) -> None:
        settings = {"state_dtype": config.state_dtype, **self.settings(config)}
        super().__init__(groups, {"lr": config.lr, "weight_decay": 0.0, **settings})
        self._names, self._seed = names, seed
        self._is_int8 = config.state_dtype == "int8"
        for group in self.param_groups:
            for parameter in group["params"]:
                self._check(parameter)

    @staticmethod
    def settings(config: OptimizerConfig) -> dict[str, Any]:
        """Return the settings of this algorithm for the parameter groups."""
        raise NotImplementedError

    def update(
        self,
        value: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        """Update ``value``, a piece of a parameter, and its ``moments`` in place. ``step`` counts
        from 1."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once. No communication."""
        loss = None
        if closure is not None:
            loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer of the same class. Its tensors may be unsharded or local
        shards.

        Raises `ConfigError` for state in another dtype.
        """
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=False):
            there = given.get("state_dtype", "fp32")
            if there != group["state_dtype"]:
                raise ConfigError(
                    f"the state has state_dtype={there}, this optimizer {group['state_dtype']}: "
                    "build the optimizer with the state's optimizer.state_dtype"
                )
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            loaded = dict(state)
            # torch has cast the codes to the dtype of the parameter, but this dtype represents each
            # code exactly. The codes are converted back below.
            for moment in self.moments:
                for key in (moment.key, moment.scale_key):
                    state.pop(key, None)
            for key, tensor in self._state_of(parameter).items():
                if type(loaded[key]) is type(tensor):
                    tensor.copy_(loaded[key])
                else:
                    copy_part(tensor, loaded[key].to(tensor.dtype))

    def _check(self, parameter: Tensor) -> None:
        name = self._names[parameter]
        if not parameter.is_floating_point() or not local_part(parameter).is_contiguous():
            raise ConfigError(
                f"optimizer.state_dtype: {name} is not a contiguous tensor of real numbers; use "
                "optimizer.state_dtype=fp32"
            )
        if self._is_int8 and parameter.ndim > 1:
            try:
                scales_region(parameter)
            except ValueError as error:
                raise ConfigError(
                    f"optimizer.state_dtype=int8: {name}: {error}; use "
                    "optimizer.state_dtype=bf16, or another mesh.tensor"
                ) from None

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments of ``parameter`` by key. Missing moments are created; moments that
        were loaded in another dtype are converted."""
        state = self.state[parameter]
        dtype = parameter.dtype
        if parameter.ndim > 1:
            dtype = torch.bfloat16
        has_codes = self._is_int8 and parameter.ndim > 1
        found: dict[str, Tensor] = {}
        for moment in self.moments:
            if has_codes:
                dtype = moment.dtype
                if moment.scale_key not in state:
                    state[moment.scale_key] = scales_like(parameter, torch.float32)
                found[moment.scale_key] = state[moment.scale_key]
            if moment.key not in state:
                state[moment.key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if state[moment.key].dtype != dtype:
                state[moment.key] = state[moment.key].to(dtype)
            found[moment.key] = state[moment.key]
        return found

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        tensors = self._state_of(parameter)
        step = state.setdefault("step", torch.tensor(0.0))
        step += 1
        number = int(step)
        local = local_part(parameter)
        if not local.numel():  # more ranks than rows
            return
        assert parameter.grad is not None
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        rows = local.shape[0] if local.ndim > 1 else 1
        values = local.view(rows, -1)
        gradients = local_part(parameter.grad).reshape(rows, -1)
        held = {key: local_part(each).view(rows, -1) for key, each in tensors.items()}
        name, keys = self._names[parameter], []
        # Each moment has its own key: with the same random numbers, both moments would be rounded
        # in the same direction.
        for moment in self.moments:
            key = key_of(self._seed, number, name, moment.key)
            keys.append(sent_to(local.device, torch.tensor(key, dtype=torch.int32)))
        for piece in _pieces(parameter, values):
            place = piece.rows, piece.columns
            # Always copy, because `update` works in place.
            value = values[place].to(dtype, copy=True)
            moments = [self._decode(each, held, piece, dtype) for each in self.moments]
            self.update(value, gradients[place].to(dtype, copy=True), moments, group, number)
            values[place] = value.to(values.dtype)
            for each, updated, key_of_moment in zip(self.moments, moments, keys, strict=True):
                self._encode(each, held, piece, updated, key_of_moment)

    def _decode(
        self, moment: Moment, held: Mapping[str, Tensor], piece: _Blocks, dtype: torch.dtype
    ) -> Tensor:
        codes = held[moment.key][piece.rows, piece.columns]
        scales = held.get(moment.scale_key)
        if scales is None:
            return codes.to(dtype, copy=True)
        values = moment.decode(
            _in_blocks(codes, piece), scales[piece.rows, piece.blocks], dtype
        ).flatten(1)
        return values[:, : codes.shape[1]].contiguous()

    def _encode(
        self,
        moment: Moment,
        held: Mapping[str, Tensor],
        piece: _Blocks,
        values: Tensor,
        key: Tensor,
    ) -> None:
        codes = held[moment.key]
        place = piece.rows, piece.columns
        if codes.dtype == torch.bfloat16 and values.dtype != codes.dtype:
            codes[place] = round_to_bf16(values, uniform(key, piece.positions))
        elif moment.scale_key not in held:
            codes[place] = values.to(codes.dtype)
        else:
            noise = uniform(key, piece.positions).to(values.dtype)
            found, scale = moment.encode(_in_blocks(values, piece), _in_blocks(noise, piece))
            codes[place] = found.flatten(1)[:, : values.shape[1]]
            held[moment.scale_key][piece.rows, piece.blocks] = scale.to(
                held[moment.scale_key].dtype
            )


class LowPrecisionAdam(LowPrecisionOptimizer):
    """Updates like ``torch.optim.Adam``: weight decay is added to the gradient."""

    moments = (Moment("exp_avg", True), Moment("exp_avg_sq", False))

    @staticmethod
    def settings(config: OptimizerConfig) -> dict[str, Any]:
        return {"betas": tuple(config.betas), "eps": config.eps}

    def decay(self, value: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Apply weight decay."""
        if group["weight_decay"]:
            gradient.add_(value, alpha=group["weight_decay"])

    def update(
        self,
        value: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        average, squares = moments
        beta1, beta2 = group["betas"]
        self.decay(value, gradient, group)
        average.lerp_(gradient, 1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = squares.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        value.addcdiv_(average, divisor, value=-group["lr"] / (1 - beta1**step))


class LowPrecisionAdamW(LowPrecisionAdam):
    """Updates like ``torch.optim.AdamW``: weight decay is separate from the gradient."""

    def decay(self, value: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        value.mul_(1 - group["lr"] * group["weight_decay"])


class LowPrecisionSGD(LowPrecisionOptimizer):
    """Updates like ``torch.optim.SGD`` with momentum."""

    moments = (Moment("momentum_buffer", True),)

    @staticmethod
    def settings(config: OptimizerConfig) -> dict[str, Any]:
        return {"momentum": config.momentum, "nesterov": config.nesterov}

    def update(
        self,
        value: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        (momentum,) = moments
        if group["weight_decay"]:
            gradient.add_(value, alpha=group["weight_decay"])
        momentum.mul_(group["momentum"]).add_(gradient)
        if group["nesterov"]:
            gradient.add_(momentum, alpha=group["momentum"])
        value.add_(gradient if group["nesterov"] else momentum, alpha=-group["lr"])


_CLASSES = {"adamw": LowPrecisionAdamW, "adam": LowPrecisionAdam, "sgd": LowPrecisionSGD}


def low_precision_optimizer(
    groups: list[dict[str, Any]],
    names: Mapping[Tensor, str],
    config: OptimizerConfig,
    seed: int,
) -> LowPrecisionOptimizer:
    """Return the optimizer for ``optimizer.state_dtype`` bf16 or int8.

    Checkpoints compare optimizers by class name, so the name contains the dtype, as in
    ``AdamW_int8``.
    """
    base = _CLASSES[config.name]
    kind = base.__name__.removeprefix("LowPrecision")
    made: type[LowPrecisionOptimizer] = type(f"{kind}_{config.state_dtype}", (base,), {})
    return made(groups, names, config, seed)


def _pieces(parameter: Tensor, values: Tensor) -> Iterator[_Blocks]:
    """Yield pieces that consist of complete blocks and together cover ``values``, this rank's shard
    as [rows, columns]."""
    region, device = local_region(parameter), values.device
    columns = math.prod(parameter.shape[1:])
    first_row = first_column = 0
    if parameter.ndim > 1:
        first_row = region.offsets[0]
        first_column = region.offsets[1] * math.prod(parameter.shape[2:])
    elif parameter.ndim:
        first_column = region.offsets[0]
    block = block_length(columns)
    rows, held = values.shape
    grid = rows, -(-held // block)
    most = _PIECE_ON_CPU if device.type == "cpu" else _PIECE
    for piece in Region.of_shape(grid).pieces(grid, max(1, most // block)):
        in_rows, in_blocks = piece.slices
        taken = slice(in_blocks.start * block, min(in_blocks.stop * block, held))
        begins = torch.arange(in_rows.start, in_rows.stop, device=device)
        begins = begins.add_(first_row).mul_(columns).add_(first_column)
        # int32 wraps around, as in `uniform`.
        within = torch.arange(taken.start, taken.stop, dtype=torch.int32, device=device)
        yield _Blocks(in_rows, in_blocks, taken, block, begins.to(torch.int32)[:, None] + within)


def _in_blocks(values: Tensor, piece: _Blocks) -> Tensor:
    """Return ``values`` as [rows, blocks, block size], padded with zeros."""
    missing = -values.shape[1] % piece.block
    return F.pad(values, (0, missing)).unflatten(1, (-1, piece.block))
