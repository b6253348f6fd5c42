"""Code of a user's own that the trainer calls: `Hook`, what its methods get (`RunView`) and may
return (`HookResult`), and the calls themselves (`HookCalls`).

[Note: hooks on every rank] Every rank calls every method, at the same points, but only this rank
knows what it returned or raised. One exchange per step, where there are hooks, tells all ranks, so
that all save, stop or end together. What happens in between (``save``) travels with the next one.
"""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.base.config import TrainConfig
from parallel2d.base.config.options import load_reference
from parallel2d.base.errors import ConfigError, HookError
from parallel2d.base.exchange import all_gather
from parallel2d.base.replicas import first_rank
from parallel2d.parallel.sync import outer_parameters
from parallel2d.parallel.weights.named_tensors import undisturbed
from parallel2d.training.data.tokenizer import Tokenizer, load_tokenizer
from parallel2d.training.loss.model_loss import logits_in
from parallel2d.training.metrics import keys

_KEY = "train.hooks"
# Names of a row that the trainer fills, which a metric of a hook cannot have.
_TAKEN = {value for value in vars(keys).values() if isinstance(value, str)}
_TAKEN_GROUPS = (
    *("comm/", "goodput/", "memory/", "rank/", "replicas/", "sync/", "throughput/", "time/"),
)


@dataclass(frozen=True)
class RunView:
    """Shows a run to a hook, to read and not to change."""

    config: TrainConfig
    model: nn.Module  # sharded: its parameters are this rank's parts
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    device: torch.device
    rank: int
    run_dir: str
    tokenizer: tuple[str, str]  # of the data, with its fingerprint; empty where there is none
    # On the console and in ``train.log``; may be called on every rank, and rank 0 alone writes
    say: Callable[[str], None]  # a line for people
    show_text: Callable[[str, str, int], None]  # (tag, text, step); in TensorBoard too

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files: rank 0, as long as it is there."""
        return self.rank == first_rank()


@dataclass(frozen=True)
class HookResult:
    """Tells what a method of a hook asks for. One rank that asks is enough."""

    metrics: Mapping[str, Any] = field(default_factory=dict)  # the mean over ranks that gave it
    save: bool = False  # after this step
    stop: str | None = None  # the reason why the run should end after this step, saved


Returned = Mapping[str, Any] | HookResult | None


class Hook:
    """Methods that the trainer calls on every rank; none does anything here.

    `start`, `step` and `validation` may return metrics, or a `HookResult`. A method that raises
    ends the run on every rank. ``collective``: whether methods run collectives, as a forward of a
    sharded model does. An exception in one of those ends this rank at once, because the others wait
    inside a collective and not where errors are exchanged.
    """

    collective = False

    def start(self, run: RunView, step: int) -> Returned:
        """Before the first step of this process, after ``step`` finished steps: 0, or those of the
        run that is resumed or restarted. What it returns counts in the first step."""

    def step(self, run: RunView, step: int, metrics: Mapping[str, float]) -> Returned:
        """After step ``step``, before it is saved and recorded. ``metrics``: ``loss``,
        ``grad_norm``, ``learning_rate``, ``tokens``, ``samples``, ``skipped_steps``, the same on
        every rank, and this rank's ``time/step_s``."""

    def validation(self, run: RunView, step: int, metrics: Mapping[str, float]) -> Returned:
        """After a validation, before `step`. ``metrics``: losses by key, equal on every rank."""

    def save(self, run: RunView, step: int, path: str) -> None:
        """Once the checkpoint of ``step`` is published at ``path``."""

    def end(self, run: RunView, step: int, reason: str) -> None:
        """After the last step of this process, when everything is saved. ``reason``: ``finished``,
        ``preempted``, or why the run was stopped. Not called after an error."""


@dataclass(frozen=True)
class AgreedResult(HookResult):
    """What the hooks of all ranks ask for in a step, the same on every rank."""

    saved: bool = False  # whether every rank passed true


def check_hooks(entries: Sequence[Any]) -> None:
    """Raises `ConfigError` for what is no importable `Hook`, or does not take its arguments."""
    for reference, arguments in map(_entry, entries):
        kind = load_reference(_KEY, reference)
        if not isinstance(kind, type) or not issubclass(kind, Hook):
            raise ConfigError(f"{_KEY}: {reference} is no class derived from parallel2d.hooks.Hook")
        try:
            inspect.signature(kind).bind(**arguments)
        except TypeError as error:
            raise ConfigError(f"{_KEY}: {reference}: {error}") from None


def build_hooks(entries: Sequence[Any]) -> list[Hook]:
    """Makes what ``train.hooks`` names. Raises `ConfigError` as `check_hooks`, or if one raises."""
    check_hooks(entries)
    hooks = []
    for reference, arguments in map(_entry, entries):
        try:
            hooks.append(load_reference(_KEY, reference)(**arguments))
        except Exception as error:
            raise ConfigError(f"{_KEY}: {reference}: {_in_one_line(error)}") from error
    return hooks


def _entry(entry: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    arguments = dict(entry)
    return arguments.pop("hook"), arguments


class HookCalls:
    """Calls the methods of ``hooks``, and exchanges what came of it; see
    [Note: hooks on every rank]. Without hooks nothing is exchanged."""

    def __init__(self, hooks: Sequence[Hook], run: RunView) -> None:
        self.hooks = list(hooks)
        self.run = run
        sets = run.config.data.validation
        self._taken = _TAKEN | {keys.set_loss_key(name) for name in sets}
        # Of this rank, since the last exchange
        self._metrics: dict[str, float] = {}
        self._given_by: dict[str, Hook] = {}
        self._save = False
        self._stop: str | None = None
        self._error: tuple[bool, str] | None = None  # whether it is a `ConfigError`, and its text
        self._own_error: Exception | SystemExit | None = None

    def start(self, step: int) -> None:
        """Collective. Raises `HookError`, or `ConfigError` if a hook did, alike on every rank."""
        if not self.hooks:
            return
        self._call("start", step, step)
        # What was returned waits for the first step; errors do not.
        self._raise_first(all_gather(self._error))

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        validation: Mapping[str, float] | None,
        saved: bool,
    ) -> AgreedResult:
        """After a step, and a validation where one was done. ``saved``: a value of each rank, of
        which `AgreedResult` tells whether it is true on all. Collective. Raises as `start`."""
        if validation is not None:
            self._call("validation", step, step, validation)
        self._call("step", step, step, metrics)
        # A mapping is sent as pairs, so that a name may be anything.
        own = [list(self._metrics.items()), self._save, self._stop, saved, self._error]
        given, saves, stops, are_saved, errors = zip(*all_gather(own), strict=True)
        self._metrics = {}
        self._given_by = {}
        self._save = False
        self._stop = None
        self._raise_first(errors)
        values: dict[str, list[float]] = {}
        for name, value in itertools.chain.from_iterable(given):
            values.setdefault(name, []).append(value)
        return AgreedResult(
            # Added in the order of the ranks, so the mean is the same on all of them.
            metrics={name: sum(each) / len(each) for name, each in values.items()},
            save=any(saves),
            stop=next(filter(None, stops), None),
            saved=all(are_saved),
        )

    def saved(self, step: int, path: str) -> None:
        """After the checkpoint of ``step`` was published. The next exchange raises its errors."""
        self._call("save", step, step, path)

    def end(self, step: int, reason: str) -> None:
        """Collective. Raises as `start`."""
        if not self.hooks:
            return
        self._call("end", step, step, reason)
        self._raise_first(all_gather(self._error))

    def _call(self, method: str, step: int, *arguments: Any) -> None:
        for hook in self.hooks:
            try:
                self._take(hook, method, getattr(hook, method)(self.run, *arguments))
            # sys.exit on one rank would leave the others in the exchange.
            except (Exception, SystemExit) as error:
                self._fail(hook, method, step, error)

    def _fail(self, hook: Hook, method: str, step: int, error: Exception | SystemExit) -> None:
        """Keeps the first error for the next exchange; raises one of a collective hook now."""
        kind = type(hook)
        where = f"{_KEY}: {kind.__module__}:{kind.__qualname__}"
        if isinstance(error, ConfigError):
            text = f"{where}: {error}"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            # The first frame is ours, which made the call.
            place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
            text = (
                f"{where}.{method} failed on rank {self.run.rank} at step {step}: "
                f"{_in_one_line(error)}{place}"
            )
        if self._error is None:
            self._error = (isinstance(error, ConfigError), text)
            self._own_error = error
        if hook.collective:
            self._raise_first([self._error])

    def _raise_first(self, errors: Sequence[tuple[bool, str] | None]) -> None:
        for is_config, text in filter(None, errors):
            kind = ConfigError if is_config else HookError
            raise kind(text) from self._own_error

    def _take(self, hook: Hook, method: str, returned: Any) -> None:
        """Adds what a method returned. Raises TypeError or ValueError for what it may not."""
        if returned is None:
            return
        if method in ("save", "end"):
            raise TypeError(f"{method} returned {returned!r}; it may return nothing")
        result = HookResult(returned) if isinstance(returned, Mapping) else returned
        if not isinstance(result, HookResult):
            raise TypeError(
                f"{method} returned {returned!r}; it may return a dict of metrics, a HookResult or "
                "None"
            )
        for name, value in result.metrics.items():
            self._add(hook, name, value)
        self._save = self._save or bool(result.save)
        if result.stop and self._stop is None:
            self._stop = str(result.stop)

    def _add(self, hook: Hook, name: Any, value: Any) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a metric has the name {name!r}, which is no string")
        if name in self._taken or name.startswith(_TAKEN_GROUPS):
            raise ValueError(f"the metric {name} is one that the trainer measures")
        # The newer value of one hook counts: that of `step` after that of `start`.
        if self._given_by.setdefault(name, hook) is not hook:
            raise ValueError(f"the metric {name} is given by two hooks")
        self._metrics[name] = float(value)


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(eq=False)
class SampleText(Hook):
    """Shows ``tokens`` tokens that the model continues ``prompt`` with, every ``every`` steps: on
    the console, in ``train.log`` and as a text in TensorBoard. For models that read token ids from
    left to right.

    Every rank runs the same forwards, on rows of ``train.seq_len`` tokens. ``temperature`` 0 takes
    the likeliest token; above, one is drawn with a generator of its own, from ``train.seed`` and
    the step. Random numbers, modes and parameters of the training stay as they were.
    ``tokenizer``: as ``data.tokenizer``, for data=tokens, whose folder only names it.
    """

    every: int = 100
    prompt: str = "\n"
    tokens: int = 64
    temperature: float = 0.0
    tokenizer: str | None = None
    end_token: str | None = None

    collective = True
    _loaded = None

    def __post_init__(self) -> None:
        if self.every < 1 or self.tokens < 1 or self.temperature < 0:
            raise ConfigError(
                f"every={self.every} and tokens={self.tokens} must be at least 1, "
                f"temperature={self.temperature} at least 0"
            )

    def start(self, run: RunView, step: int) -> None:
        """Raises `ConfigError` for data without a tokenizer, or with another one."""
        name, fingerprint = run.tokenizer
        if not fingerprint:
            raise ConfigError(
                f"SampleText needs a tokenizer, and data={run.config.data.name} has none"
            )
        given = self.tokenizer or run.config.data.tokenizer
        self._loaded = load_tokenizer(given, self.end_token or run.config.data.end_token)
        if self._loaded.fingerprint != fingerprint:
            raise ConfigError(
                f"SampleText(tokenizer={given}) is not the tokenizer of the data, {name}; give the "
                "path of that tokenizer.json, and its end_token"
            )
        if not len(self._loaded.encode([self.prompt])[0]):
            raise ConfigError("SampleText(prompt=...) must have at least one token")

    def step(self, run: RunView, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a text if one is due. Collective."""
        if step % self.every:
            return
        loaded = self._loaded
        assert loaded is not None, "start() comes first"
        generator = torch.Generator().manual_seed((run.config.train.seed + step) % 2**63)
        ids = [int(token) for token in loaded.encode([self.prompt])[0]]
        begin = len(ids)
        with outer_parameters(run.model), undisturbed(run.model, run.device):
            # A fixed number of forwards, whatever is generated: all ranks run the same collectives.
            for _ in range(self.tokens):
                ids.append(self._next(run, loaded, ids, generator))
        # What comes after the end of a document belongs to another one.
        if loaded.end_id in ids[begin:]:
            del ids[ids.index(loaded.end_id, begin) :]
        run.show_text("sample", loaded.decode(ids), step)

    def _next(
        self, run: RunView, loaded: Tokenizer, ids: list[int], generator: torch.Generator
    ) -> int:
        """The token after ``ids``, of which the last ``train.seq_len`` are read."""
        length = run.config.train.seq_len
        read = ids[-length:]
        # Padding on the right does not change what comes before it.
        row = read + [loaded.end_id] * (length - len(read))
        inputs = torch.tensor([row], device=run.device)
        arguments = [inputs]
        if run.config.data.intra_document_masking:
            arguments.append(torch.zeros_like(inputs))
        output = run.model(*arguments)
        logits = logits_in(output)
        # The output of a model may be split over the tensor axis.
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if logits.shape[1] != length:
            raise ConfigError("SampleText needs logits of every position, which this model omits")
        scores = logits[0, len(read) - 1, : loaded.vocab_size].double().cpu()
        if self.temperature == 0:
            return int(scores.argmax())
        chances = (scores / self.temperature).softmax(0)
        return int(torch.multinomial(chances, 1, generator=generator))
