"""Where the nodes of a job meet: the store, and the round of the rendezvous that is open.

``launch.rdzv_endpoint`` flows in; a store and a rendezvous handler for torch's elastic agent flow out.

[Note: where the store lives] The store may run on one of the nodes, which then must not die: whichever node owns the endpoint's address
opens it when nothing listens there yet. Or it runs outside of them (``python -m parallel2d.launch store``) and no node matters.
A store outside outlives a job, and torch's rendezvous is closed for ever once a job has ended; so each job's name carries a
number, which the next job of that name finds closed and counts up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from parallel2d.config import ConfigError, LaunchConfig
from parallel2d.interface import Interface, choose_interface, is_loopback
from parallel2d.store import PortTaken, bound_store, connected_store, owns_address, resolve, split_endpoint

_READ_TIMEOUT_S = 60.0  # of one operation on the store
_FIRST_CALL_S = 20.0  # at the start of a job, for the largest number of nodes
_LAST_CALL_S = 3.0  # after the smallest number of nodes is there, for those that are still coming
_BEAT_S, _BEATS_MISSED = 1, 3  # a node whose launcher is silent for 3 s has left


@dataclass(frozen=True)
class Meeting:
    """A store of this job, and this machine's way to it."""

    store: Any
    endpoint: str
    hosted: bool  # by this process
    interface: Interface
    name: str  # of the rendezvous

    def handler(self, config: LaunchConfig) -> Any:
        """A rendezvous handler for torch's elastic agent."""
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        smallest, largest = config.node_range
        parameters = RendezvousParameters(
            backend="c10d",
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
        return create_handler(self.store, C10dRendezvousBackend(self.store, self.name), parameters)

    def wait_for_all(self, config: LaunchConfig) -> None:
        """At the start of a job, until all its launchers are here or a while has passed; otherwise returns at once. Without it the first
        would start with the smallest number of nodes and have to start again for each that comes."""
        largest, key = config.node_range[1], f"parallel2d/arrived/{self.name}"
        deadline = time.monotonic() + _FIRST_CALL_S
        arrived = self.store.add(key, 1)
        while arrived < largest and time.monotonic() < deadline:
            time.sleep(0.2)
            arrived = self.store.add(key, 0)

    def close(self) -> None:
        """The job has ended: the next of its name takes another number."""
        self.store.set(_closed_key(self.name), "closed")


def meet_alone() -> Meeting:
    """For a single node: a store on loopback that nobody else sees."""
    store = bound_store("127.0.0.1", 0, timeout_s=_READ_TIMEOUT_S)
    return Meeting(store, f"127.0.0.1:{store.port}", True, Interface("lo", "127.0.0.1"), "parallel2d")


def meet(config: LaunchConfig) -> Meeting:
    """The store at ``launch.rdzv_endpoint``, opened here if it is this machine's to open. See [Note: where the store lives].

    Waits ``launch.rendezvous_timeout`` seconds for a store elsewhere. Raises `ConfigError` for an address that cannot work.
    """
    endpoint = str(config.rdzv_endpoint)
    try:
        host, port = split_endpoint(endpoint)
        interface = choose_interface(host)
        mine = owns_address(host)
    except ConfigError as error:
        raise ConfigError(f"launch.rdzv_endpoint={endpoint}: {error}") from None
    addresses = [address for _, address, _ in resolve(host)]
    if mine and all(is_loopback(address) for address in addresses) and config.node_range[1] > 1:
        raise ConfigError(
            f"launch.rdzv_endpoint={endpoint}: {host} is {addresses[0]} on this machine, which no other node reaches; give the "
            "address or name that other nodes use"
        )
    if mine:
        try:
            store = bound_store(host, port, timeout_s=_READ_TIMEOUT_S)
            return Meeting(store, endpoint, True, interface, _open_name(store, config.job_id))
        except PortTaken:  # by the store of somebody else, or by that of an earlier launcher on this node
            pass
    try:
        store = connected_store(host, port, timeout_s=_READ_TIMEOUT_S, connect_timeout_s=config.rendezvous_timeout)
    except ConfigError as error:
        raise ConfigError(f"launch.rdzv_endpoint={endpoint}: {error}") from None
    return Meeting(store, endpoint, False, interface, _open_name(store, config.job_id))


def _closed_key(name: str) -> str:
    return f"parallel2d/closed/{name}"


def _open_name(store: Any, job: str) -> str:
    number = 0
    while store.check([_closed_key(f"{job}-{number}")]):
        number += 1
    return f"{job}-{number}"
