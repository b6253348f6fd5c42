"""Keeps the state of torch's rendezvous as JSON, because a pickle can run code: `JsonBackend`.

torch's handler hands its backend a pickle and takes one back. `JsonBackend` puts JSON into the
store instead: it reads the pickle that this process has made, and makes one from JSON that it has
checked.
"""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from parallel2d.launch.elastic_internals import NodeDescription, RendezvousState


class JsonBackend(RendezvousBackend):
    """Keeps the state of the rendezvous ``name`` under one key of ``store``. Its tokens are the
    stored text."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._key = store, f"parallel2d/rendezvous/{name}"

    @property
    def name(self) -> str:
        return "parallel2d"

    def get_state(self) -> tuple[bytes, bytes] | None:
        """The state as torch wants it, and its token; None before the first."""
        text = self._replace("", "")
        return (_pickled(text), text) if text else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, bytes, bool] | None:
        """Replaces the state that ``token`` stands for. Returns what there is now, and whether it
        is this."""
        new = to_json(pickle.loads(state))  # made by this process
        text = self._replace(token if isinstance(token, bytes) else "", new)
        return (_pickled(text), text, text == new.encode()) if text else None

    def _replace(self, expected: str | bytes, desired: str) -> bytes:
        try:
            return self._store.compare_set(self._key, expected, desired)  # type: ignore[arg-type]
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(str(error)) from error


def to_json(state: RendezvousState) -> str:
    """The state as text."""
    told = {
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline.isoformat() if state.deadline else None,
        "closed": state.closed,
        "participants": [[*_node(node), rank] for node, rank in state.participants.items()],
        "wait_list": [_node(node) for node in state.wait_list],
        "redundancy_list": [_node(node) for node in state.redundancy_list],
        "last_heartbeats": [
            [*_node(node), beat.isoformat()] for node, beat in state.last_heartbeats.items()
        ],
    }
    return json.dumps(told)


def from_json(text: bytes) -> RendezvousState:
    """The state from text. Raises RendezvousStateError for anything that `to_json` does not
    make."""
    state, to_time = RendezvousState(), datetime.fromisoformat
    try:
        told = json.loads(text)
        state.round = _of(int, told["round"])
        state.complete, state.closed = _of(bool, told["complete"]), _of(bool, told["closed"])
        state.deadline = None if told["deadline"] is None else to_time(told["deadline"])
        state.participants = {
            _to_node(node): _of(int, rank) for *node, rank in told["participants"]
        }
        state.wait_list = {_to_node(node) for node in told["wait_list"]}
        state.redundancy_list = {_to_node(node) for node in told["redundancy_list"]}
        state.last_heartbeats = {
            _to_node(node): to_time(beat) for *node, beat in told["last_heartbeats"]
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RendezvousStateError(f"the state of the rendezvous is damaged: {error}") from None
    return state


def _pickled(text: bytes) -> bytes:
    return pickle.dumps(from_json(text))


def _node(node: NodeDescription) -> list[str | int]:
    return [node.addr, node.pid, node.local_id]


def _to_node(values: list[Any]) -> NodeDescription:
    address, process, number = values
    return NodeDescription(_of(str, address), _of(int, process), _of(int, number))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
