"""User code that the trainer calls: `Hook`. The methods of a hook receive a `RunView` and may
return a `HookResult`. `HookCalls` calls the hooks of a run.

[Note: hooks on every rank] Every rank calls each method of a hook at the same points of the loop.
The result or exception of a call is first known only on the rank that made the call. If a run has
hooks, one all-gather per step distributes the results and exceptions, so that all ranks save, stop
or fail together. `Hook.row` and `Hook.save` run after this all-gather, so the exceptions of these
two methods are sent with the next all-gather.
"""

from __future__ import annotations

import inspect
import itertools
import math
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
from parallel2d.base.errors import ConfigError, HookError, nearest_matches
from parallel2d.base.exchange import all_gather
from parallel2d.base.replicas import first_rank, is_joining
from parallel2d.parallel.sync import outer_parameters
from parallel2d.parallel.weights.named_tensors import undisturbed
from parallel2d.training.data.tokenizer import Tokenizer, load_tokenizer
from parallel2d.training.loss.model_loss import logits_in
from parallel2d.training.metrics import keys

_KEY = "train.hooks"
# Names of the trainer's own metrics, which hooks must not use
_TAKEN = {value for value in vars(keys).values() if isinstance(value, str)}
_TAKEN_GROUPS = (
    *("comm/", "goodput/", "memory/", "rank/", "replicas/", "sync/", "throughput/", "time/"),
)


@dataclass(frozen=True)
class RunView:
    """The objects and facts of a run that hooks may read. Hooks must not change them."""

    config: TrainConfig
    model: nn.Module  # sharded: its parameters are this rank's local shards
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    device: torch.device
    rank: int
    run_dir: str
    # Name and fingerprint of the data's tokenizer; empty strings if the data have none
    tokenizer: tuple[str, str]
    # Functions that write to the console and to ``train.log``. All ranks may call them, but only
    # rank 0 writes.
    say: Callable[[str], None]  # a line for users
    show_text: Callable[[str, str, int], None]  # (tag, text, step); also in TensorBoard

    @property
    def is_first(self) -> bool:
        """True on the rank that writes files: rank 0, or the first live rank."""
        return self.rank == first_rank()


@dataclass(frozen=True)
class HookResult:
    """The result of a hook's method. The run saves or stops if at least one rank requests it."""

    # Values by name. A number is averaged over the ranks that returned a number. Pairs (sum, count)
    # of all ranks give the total sum divided by the total count.
    metrics: Mapping[str, Any] = field(default_factory=dict)
    save: bool = False  # save a checkpoint after this step
    stop: str | None = None  # the reason to end the run after this step, with a checkpoint


Returned = Mapping[str, Any] | HookResult | None


class Hook:
    """Base class with methods that the trainer calls on every rank; the methods here do nothing.

    `start`, `step` and `validation` may return metrics or a `HookResult`. A method that raises ends
    the run on every rank.

    Attributes:
        collective: True if methods run collectives, for example a forward of a sharded model. An
            exception in a method then ends this rank immediately: the other ranks wait in the
            collective of the hook, and cannot receive the error.
    """

    collective = False

    def start(self, run: RunView, step: int) -> Returned:
        """Called before the first step of this process. ``step`` is the number of finished steps,
        which is 0 in a new run. The trainer handles the result with the results of the first
        step."""

    def step(self, run: RunView, step: int, metrics: Mapping[str, float]) -> Returned:
        """Called after step ``step``, before a checkpoint of this step is saved and its metrics row
        is written.

        Args:
            metrics: ``loss``, ``grad_norm``, ``learning_rate``, ``tokens``, ``samples`` and
                ``skipped_steps``, equal on every rank, and this rank's ``time/step_s``.
        """

    def validation(self, run: RunView, step: int, metrics: Mapping[str, float]) -> Returned:
        """Called after a validation, before `step`. ``metrics``: losses by key, equal on every
        rank."""

    def row(self, run: RunView, step: int, row: Mapping[str, Any]) -> None:
        """Called after every row of ``metrics.jsonl``, with all values of the row. Times, memory
        and goodput may differ between ranks; the file has the values of rank 0."""

    def save(self, run: RunView, step: int, path: str) -> None:
        """Called after the checkpoint of ``step`` was published at ``path``."""

    def end(self, run: RunView, step: int, reason: str) -> None:
        """Called after the last step and the last save of this process. Not called after an error.
        ``reason``: ``finished``, ``preempted``, or the reason of an early stop."""


@dataclass(frozen=True)
class AgreedResult(HookResult):
    """The combined result of the hooks of all ranks in a step, equal on every rank."""

    saved: bool = False  # True if every rank passed ``saved=True`` to `HookCalls.step`


def check_hooks(entries: Sequence[Any]) -> None:
    """Raise `ConfigError` unless every entry is an importable `Hook` with valid arguments."""
    for reference, arguments in map(_entry, entries):
        kind = load_reference(_KEY, reference)
        if not isinstance(kind, type) or not issubclass(kind, Hook):
            raise ConfigError(
                f"{_KEY}: {reference} is not a class derived from parallel2d.hooks.Hook"
            )
        _check_methods(reference, kind)
        try:
            inspect.signature(kind).bind(**arguments)
        except TypeError as error:
            raise ConfigError(f"{_KEY}: {reference}: {error}") from None


def _functions_of(kind: type) -> dict[str, Any]:
    return {name: each for name, each in vars(kind).items() if inspect.isfunction(each)}


def _check_methods(reference: str, kind: type[Hook]) -> None:
    """Raise `ConfigError` for a misspelt method: a name similar to a method that the trainer calls,
    with the same number of parameters."""
    called = _functions_of(Hook)
    for base in kind.__mro__[: kind.__mro__.index(Hook)]:
        own = _functions_of(base)
        for name in own.keys() - called.keys():
            near = nearest_matches(name, called, count=1)
            parameters = len(inspect.signature(own[name]).parameters)
            if near and parameters == len(inspect.signature(called[near[0]]).parameters):
                raise ConfigError(
                    f"{_KEY}: {reference} has a method {name}, which the trainer does not call: "
                    f"did you mean {near[0]}?"
                )


def build_hooks(entries: Sequence[Any]) -> list[Hook]:
    """Build the hooks of ``train.hooks``. Raises `ConfigError` as `check_hooks`, and if a
    constructor raises."""
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
    """Calls the methods of ``hooks`` and all-gathers their results; see
    [Note: hooks on every rank]. Without hooks, `start` and `end` do nothing."""

    def __init__(self, hooks: Sequence[Hook], run: RunView) -> None:
        self.hooks = list(hooks)
        self.run = run
        sets = run.config.data.validation
        self._taken = _TAKEN | set(map(keys.set_loss_key, sets))
        # Results of this rank since the last all-gather
        self._metrics: dict[str, tuple[float, float]] = {}  # sum and count
        self._given_by: dict[str, Hook] = {}
        self._save = False
        self._stop: str | None = None
        self._error: tuple[bool, str] | None = None  # (True for a `ConfigError`, message)
        self._own_error: Exception | SystemExit | None = None

    def start(self, step: int) -> None:
        """Call `Hook.start`. Raises `HookError` on every rank, or `ConfigError` if a hook raised a
        `ConfigError`. Collective."""
        if not self.hooks:
            return
        self._call("start", step, step)
        # Errors are all-gathered immediately, results in the first step.
        self._raise_first(all_gather(self._error))

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        validation: Mapping[str, float] | None,
        saved: bool,
    ) -> AgreedResult:
        """Call the hooks after a step, and after its validation if it had one. Raises as `start`.
        Collective.

        Args:
            saved: True if the background save of this rank has ended. `AgreedResult.saved` is True
                if this value is True on all ranks.
        """
        if validation is not None:
            self._call("validation", step, step, validation)
        self._call("step", step, step, metrics)
        # Metrics are sent as pairs, so that any string may be a name.
        # A joining replica has no metrics.
        measured = [] if is_joining() else list(self._metrics.items())
        own = [measured, self._save, self._stop, saved, self._error]
        given, saves, stops, are_saved, errors = zip(*all_gather(own), strict=True)
        self._metrics = {}
        self._given_by = {}
        self._save = False
        self._stop = None
        self._raise_first(errors)
        totals: dict[str, tuple[float, float]] = {}
        # Values are added in the order of the ranks, because floating-point sums depend on the
        # order, and all ranks need exactly the same mean.
        for name, (value, count) in itertools.chain.from_iterable(given):
            total, counted = totals.get(name, (0.0, 0.0))
            totals[name] = total + value, counted + count
        means = {name: total / count for name, (total, count) in totals.items() if count}
        return AgreedResult(
            metrics=means,
            save=any(saves),
            stop=next(filter(None, stops), None),
            saved=all(are_saved),
        )

    def row(self, step: int, row: Mapping[str, Any]) -> None:
        """Call `Hook.row` after a row was recorded. An error in a hook is raised by the next call
        of `step` or `end`."""
        self._call("row", step, step, row)

    def saved(self, step: int, path: str) -> None:
        """Call `Hook.save` after the publication of ``step``. An error in a hook is raised by the
        next call of `step` or `end`."""
        self._call("save", step, step, path)

    def end(self, step: int, reason: str) -> None:
        """Call `Hook.end`. Raises as `start`. Collective."""
        if not self.hooks:
            return
        self._call("end", step, step, reason)
        self._raise_first(all_gather(self._error))

    def _call(self, method: str, step: int, *arguments: Any) -> None:
        for hook in self.hooks:
            try:
                self._take(hook, method, getattr(hook, method)(self.run, *arguments))
            # SystemExit is caught too: after sys.exit on one rank, the other ranks would wait in
            # the all-gather.
            except (Exception, SystemExit) as error:
                self._fail(hook, method, step, error)

    def _fail(self, hook: Hook, method: str, step: int, error: Exception | SystemExit) -> None:
        """Store the first error for the next all-gather. Raise an error of a collective hook
        immediately."""
        kind = type(hook)
        where = f"{_KEY}: {kind.__module__}:{kind.__qualname__}"
        if isinstance(error, ConfigError):
            text = f"{where}: {error}"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            # The first frame is the call of the hook in this module, which is not shown.
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
        """Record the result of a method. Raises TypeError or ValueError for an invalid result."""
        if returned is None:
            return
        if method in ("row", "save", "end"):
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
            raise TypeError(f"a metric has the name {name!r}, which is not a string")
        if name in self._taken or name.startswith(_TAKEN_GROUPS):
            raise ValueError(f"the metric {name} is one that the trainer measures")
        # A hook may set the same metric in `start` and in `step`: the last value counts.
        if self._given_by.setdefault(name, hook) is not hook:
            raise ValueError(f"the metric {name} is given by two hooks")
        total, count = value if isinstance(value, tuple | list) else (value, 1)
        if not 0 <= float(count) < math.inf:
            raise ValueError(f"the metric {name} has the count {count}, which must be at least 0")
        self._metrics[name] = float(total), float(count)


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(eq=False)
class SampleText(Hook):
    """Generates ``tokens`` tokens after ``prompt`` every ``every`` steps, and shows them on the
    console, in ``train.log`` and as a text in TensorBoard. For causal language models.

    Every rank runs the same forwards, on rows of ``train.seq_len`` tokens. The states of random
    generators, the train or eval modes and the parameters do not change.

    Attributes:
        temperature: 0 takes the most likely token; above 0, tokens are drawn with a separate
            generator, seeded by ``train.seed`` and the step.
        tokenizer, end_token: as in the ``data`` section; needed for data=tokens, since a prepared
            folder stores only the name of its tokenizer, and for data=bin.
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
        """Load the tokenizer. Raises `ConfigError` if neither the data nor the hook names a
        tokenizer, or if the tokenizer of the hook differs from the tokenizer of the data."""
        name, fingerprint = run.tokenizer
        if not fingerprint and self.tokenizer is None:
            raise ConfigError(
                f"SampleText needs a tokenizer, and data={run.config.data.name} names none: "
                "train.hooks=[{hook: 'parallel2d.hooks:SampleText', tokenizer: FILE}]"
            )
        given = self.tokenizer or run.config.data.tokenizer
        self._loaded = load_tokenizer(given, self.end_token or run.config.data.end_token)
        if fingerprint and self._loaded.fingerprint != fingerprint:
            raise ConfigError(
                f"SampleText(tokenizer={given}) is not the tokenizer of the data, {name}; give the "
                "path of that tokenizer.json, and its end_token"
            )
        if not len(self._loaded.encode([self.prompt])[0]):
            raise ConfigError("SampleText(prompt=...) must have at least one token")

    def step(self, run: RunView, step: int, metrics: Mapping[str, float]) -> None:
        """Show a text if one is due. Collective."""
        if step % self.every:
            return
        loaded = self._loaded
        assert loaded is not None, "start() comes first"
        generator = torch.Generator().manual_seed((run.config.train.seed + step) % 2**63)
        ids = list(map(int, loaded.encode([self.prompt])[0]))
        begin = len(ids)
        with outer_parameters(run.model), undisturbed(run.model):
            # All ranks run the same collectives: the number of forwards does not depend on text.
            for _ in range(self.tokens):
                ids.append(self._next(run, loaded, ids, generator))
        # Tokens after the end of the document belong to another document.
        if loaded.end_id in ids[begin:]:
            del ids[ids.index(loaded.end_id, begin) :]
        run.show_text("sample", loaded.decode(ids), step)

    def _next(
        self, run: RunView, loaded: Tokenizer, ids: list[int], generator: torch.Generator
    ) -> int:
        """Return the token after ``ids``. The model reads only the last ``train.seq_len`` ids."""
        length = run.config.train.seq_len
        read = ids[-length:]
        # Padding on the right does not affect earlier positions of a causal model.
        row = read + read[-1:] * (length - len(read))
        inputs = torch.tensor([row], device=run.device)
        arguments = [inputs]
        if run.config.data.intra_document_masking:
            arguments.append(torch.zeros_like(inputs))
        output = run.model(*arguments)
        logits = logits_in(output)
        # The logits may be sharded over the tensor axis.
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if logits.shape[1] != length:
            raise ConfigError("SampleText needs logits of every position, which this model omits")
        scores = logits[0, len(read) - 1, : loaded.vocab_size].double().cpu()
        if self.temperature == 0:
            return int(scores.argmax())
        chances = (scores / self.temperature).softmax(0)
        return int(torch.multinomial(chances, 1, generator=generator))
