"""The store of a job and torch's rendezvous on it: `find_rendezvous`, `own_rendezvous` of one node.

[Note: where the store lives] The store may run on one of the nodes, which then must not fail:
whichever node owns the endpoint's address opens it when nothing listens there yet. Or it runs
outside of them (``python -m parallel2d.launch store``), and any node may fail. A store outside
outlives a job, and torch's rendezvous is closed for ever once a job has ended. So each job's name
carries a number; the next job of that name finds this number closed and takes the next one.

The ranks use the same store, under names of their round. Everything that nodes and ranks exchange
goes through it, except collectives.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    create_handler,
)

from parallel2d.base.config import LaunchConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.store.address import PortTaken, owns_address, resolve, split_endpoint
from parallel2d.base.store.client import StoreClient
from parallel2d.base.store.secret import VARIABLE, find_secret, new_secret
from parallel2d.base.store.server import StoreServer, say_who_came
from parallel2d.base.topology import STORE
from parallel2d.launching.elastic_internals import NodeDescription, RendezvousState
from parallel2d.launching.network_interface import Interface, choose_interface, is_loopback

_HOSTS = "parallel2d/hosts"  # names of those that have come, each followed by a blank
_CLOSED = "parallel2d/closed"  # jobs that have ended
OUTSIDE = "parallel2d/outside"  # a key of stores that no job has opened
_READ_TIMEOUT_S = 60.0  # of one operation on the store
_FIRST_CALL_S = 20.0  # at the start of a job, for the largest number of nodes
_LAST_CALL_S = 3.0  # after the smallest number of nodes is there, for those that are still coming
_BEAT_S, _BEATS_MISSED = 1, 3  # a node whose launcher sends nothing for 3 s counts as gone


@dataclass(frozen=True)
class Rendezvous:
    """The store of a job, and how this machine reaches it."""

    store: StoreClient
    secret: str
    endpoint: str
    server: StoreServer | None  # in this process
    interface: Interface
    name: str  # of the rendezvous

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which workers find the store."""
        return {STORE: self.store.address, VARIABLE: self.secret}

    def handler(self, config: LaunchConfig) -> Any:
        """A rendezvous handler for torch's elastic agent."""
        smallest, largest = config.node_range
        parameters = RendezvousParameters(
            backend="parallel2d",
            endpoint=self.endpoint,
            run_id=self.name,
            min_nodes=smallest,
            max_nodes=largest,
            local_addr=self.interface.address,
            join_timeout=max(1, int(config.rendezvous_timeout)),
            last_call_timeout=int(_LAST_CALL_S),
            keep_alive_interval=_BEAT_S,
            keep_alive_max_attempt=_BEATS_MISSED,
        )
        return create_handler(self.store, JsonBackend(self.store, self.name), parameters)

    def wait_for_all(self, config: LaunchConfig) -> None:
        """Waits, at the start of a job, until all its launchers are here, a while has passed, or
        some have started: the first would start with the smallest number of nodes, and again for
        each that comes, or let it in while they train."""
        largest, key = config.node_range[1], f"parallel2d/arrived/{self.name}"
        deadline = time.monotonic() + _FIRST_CALL_S
        arrived = self.store.add(key, 1)
        while arrived < largest and time.monotonic() < deadline:
            if self.store.check([self.latest_prefix]):
                return
            time.sleep(0.2)
            arrived = self.store.add(key, 0)

    def announce_host(self) -> None:
        """Adds this host to those that have come."""
        self.store.append(f"{_HOSTS}/{self.name}", f"{socket.gethostname()} ")

    def hosts_there(self) -> list[str]:
        """Names of the hosts that have come. A node that gives up has left torch's own list."""
        names = b""
        with contextlib.suppress(Exception):  # the node that holds the store may have ended
            names = self.store.get(f"{_HOSTS}/{self.name}")
        return sorted(set(names.decode().split()))

    @property
    def latest_prefix(self) -> str:
        """The key of what the ranks' keys begin with."""
        return f"parallel2d/ranks/{self.name}"

    def ranks_prefix(self, group: Any) -> str:
        """Chooses what the keys of this round's ranks begin with, the same on all nodes. The first
        node deletes the keys of the round before. ``group``: torch's worker group of the round."""
        if group.group_rank == 0:
            latest = self.latest_prefix
            prefix = f"{latest}/{uuid.uuid4().hex}/"
            if self.store.check([latest]):
                self.store.delete_all(self.store.get(latest).decode())
            self.store.set(latest, prefix)
            group.store.set("parallel2d/ranks", prefix)
        return str(group.store.get("parallel2d/ranks").decode())

    def end(self) -> None:
        """Marks the job as ended: the next one of its name takes another number."""
        self.store.set(f"{_CLOSED}/{self.name}", "closed")
        self.store.delete_all(f"parallel2d/ranks/{self.name}/")

    def close(self) -> None:
        """Closes the connections, and the store where it is in this process."""
        self.store.close()
        if self.server is not None:
            self.server.close()


def own_rendezvous(folder: str) -> Rendezvous:
    """For a single node: a store in this launcher's private folder, and no port."""
    secret, loopback = new_secret(), Interface("lo", "127.0.0.1")
    server = StoreServer.within(folder, secret)
    store = StoreClient(server.address, secret, timeout_s=_READ_TIMEOUT_S)
    return Rendezvous(store, secret, server.address, server, loopback, "parallel2d")


def find_rendezvous(config: LaunchConfig) -> Rendezvous:
    """The store at ``launch.rdzv_endpoint``, opened here if it is this machine's to open. See
    [Note: where the store lives]. Waits ``launch.rendezvous_timeout`` seconds for a store
    elsewhere. Raises `ConfigError` for an address that cannot work, without a secret, and for a
    store outside of the nodes without ``launch.job_id``."""
    endpoint = str(config.rdzv_endpoint)
    secret = find_secret(config.secret_file, config.insecure)
    try:
        host, port = split_endpoint(endpoint)
        interface = choose_interface(host)
        server = None
        if owns_address(host):
            addresses = [address for _, address, _ in resolve(host)]
            if config.node_range[1] > 1 and all(map(is_loopback, addresses)):
                raise ConfigError(
                    f"{host} is {addresses[0]} on this machine, which no other node reaches; give "
                    "the address or name that other nodes use"
                )
            # The port is taken by the store of somebody else, or of an earlier launcher here.
            with contextlib.suppress(PortTaken):
                server = StoreServer.at(host, port, secret, say_who_came)
        store = StoreClient(
            server.address if server else endpoint,
            secret,
            timeout_s=_READ_TIMEOUT_S,
            connect_timeout_s=config.rendezvous_timeout,
        )
    except ConfigError as error:
        raise ConfigError(f"launch.rdzv_endpoint={endpoint}: {error}") from None
    if config.job_id is None and store.check([OUTSIDE]):
        raise ConfigError(
            f"the store at {endpoint} serves more than one job: give yours a name with "
            "launch.job_id, the same on all its nodes"
        )
    job, number = config.job_id or "parallel2d", 0
    while store.check([f"{_CLOSED}/{job}-{number}"]):
        number += 1
    return Rendezvous(store, secret, endpoint, server, interface, f"{job}-{number}")


class ReturnHandler(RendezvousHandler):
    """The rendezvous of a node that comes back to a job that goes on: it waits for nobody."""

    def __init__(self, store: Any, node: int, nodes: int, name: str, address: str) -> None:
        self._store, self._node, self._nodes, self._name = store, node, nodes, name
        self._place = RendezvousStoreInfo(address, 1)

    def get_backend(self) -> str:
        return "parallel2d"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, self._node, self._nodes, self._place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Leaves the job to the others."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        return True


class JsonBackend(RendezvousBackend):
    """Keeps the state of the rendezvous ``name`` as JSON under one key of ``store``, because a
    pickle can run code. Its tokens are the stored text. torch's handler hands its backend a pickle
    and takes one back: this reads the pickle that this process has made, and makes one from JSON
    that it has checked."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._key = store, f"parallel2d/rendezvous/{name}"

    @property
    def name(self) -> str:
        return "parallel2d"

    def get_state(self) -> tuple[bytes, bytes] | None:
        """The state as torch wants it, and its token; None before the first."""
        found = self._replace("", "")
        return found[:2] if found else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, bytes, bool] | None:
        """Replaces that of ``token``. Returns what there is now, and whether it is this."""
        new = to_json(pickle.loads(state))  # made by this process
        # Before the first state, torch gives a token that stands for none.
        return self._replace(token if isinstance(token, bytes) else "", new)

    def _replace(self, expected: str | bytes, desired: str) -> tuple[bytes, bytes, bool] | None:
        try:
            text = self._store.compare_set(self._key, expected, desired)  # type: ignore[arg-type]
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(str(error)) from error
        return (pickle.dumps(from_json(text)), text, text == desired.encode()) if text else None


def to_json(state: RendezvousState) -> str:
    """The state as text."""
    named = {
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
    return json.dumps(named)


def from_json(text: bytes) -> RendezvousState:
    """The state. Raises RendezvousStateError for anything that `to_json` does not make."""
    state, to_time = RendezvousState(), datetime.fromisoformat
    try:
        given = json.loads(text)
        state.round = _of(int, given["round"])
        state.complete, state.closed = _of(bool, given["complete"]), _of(bool, given["closed"])
        if given["deadline"] is not None:
            state.deadline = to_time(given["deadline"])
        for *node, rank in given["participants"]:
            state.participants[_to_node(node)] = _of(int, rank)
        state.wait_list = set(map(_to_node, given["wait_list"]))
        state.redundancy_list = set(map(_to_node, given["redundancy_list"]))
        for *node, beat in given["last_heartbeats"]:
            state.last_heartbeats[_to_node(node)] = to_time(beat)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RendezvousStateError(f"the state of the rendezvous is damaged: {error}") from None
    return state


def _node(node: NodeDescription) -> list[str | int]:
    return [node.addr, node.pid, node.local_id]


def _to_node(values: list[Any]) -> NodeDescription:
    address, process, number = values
    return NodeDescription(_of(str, address), _of(int, process), _of(int, number))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
