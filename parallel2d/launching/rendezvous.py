"""The rendezvous store of a job: `find_rendezvous` for several nodes, `own_rendezvous` for one.

[Note: location of the store] The store may run on one of the nodes: the node with the endpoint's
address opens the store if nothing listens at this address yet. Then this node must not fail. The
store may also run outside of the nodes (``python -m parallel2d.launch store``); then any node may
fail. A store outside of the nodes exists longer than a job. Therefore a job's name ends with a
number, and the job marks this number as closed when it ends. The next job with the same name takes
the first number that is not closed.

The ranks use the same store; a prefix for each round separates their keys. Launchers communicate
only through the store, and ranks through the store and collectives.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from parallel2d.base.config import LaunchConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.launcher_environment import STORE
from parallel2d.base.store.address import PortTaken, owns_address, resolve, split_endpoint
from parallel2d.base.store.client import StoreClient
from parallel2d.base.store.secret import VARIABLE, find_secret, new_secret
from parallel2d.base.store.server import StoreServer, log_dropped_connection
from parallel2d.launching.network_interface import Interface, choose_interface, is_loopback

_CLOSED = "parallel2d/closed"  # prefix of jobs that have ended
OUTSIDE = "parallel2d/outside"  # a key that exists only in a store outside of the nodes
_READ_TIMEOUT_S = 60.0  # time limit of one operation on the store


@dataclass(frozen=True)
class Rendezvous:
    """The store of a job, and this machine's connection to it."""

    store: StoreClient
    secret: str
    endpoint: str
    server: StoreServer | None  # set if the store runs in this process
    interface: Interface
    name: str  # of the job

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with the address and the secret of the store, for the
        workers."""
        return {STORE: self.store.address, VARIABLE: self.secret}

    @property
    def ranks_prefix(self) -> str:
        """The prefix of all keys of ranks."""
        return f"parallel2d/ranks/{self.name}/"

    @property
    def end_of_job(self) -> str | None:
        """The result of the job if a node has ended it: ``well`` or ``failed``; otherwise None."""
        key = f"{_CLOSED}/{self.name}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def end(self, how: str = "well") -> None:
        """Mark the job as ended with the result ``how``, and delete the keys of its ranks."""
        self.store.set(f"{_CLOSED}/{self.name}", how)
        self.store.delete_all(self.ranks_prefix)

    def close(self) -> None:
        """Close the connections, and the store if it runs in this process."""
        self.store.close()
        if self.server is not None:
            self.server.close()


def own_rendezvous(folder: str) -> Rendezvous:
    """Return the rendezvous of a single node. The store listens on a Unix socket in this launcher's
    private folder, not on a port."""
    secret, loopback = new_secret(), Interface("lo", "127.0.0.1")
    server = StoreServer.within(folder, secret)
    store = StoreClient(server.address, secret, timeout_s=_READ_TIMEOUT_S)
    return Rendezvous(store, secret, server.address, server, loopback, "parallel2d")


def find_rendezvous(config: LaunchConfig) -> Rendezvous:
    """Connect to the store at ``launch.rdzv_endpoint``. Open the store first if the endpoint is an
    address of this machine and the port is free. See [Note: location of the store].

    Waits up to ``launch.rendezvous_timeout`` seconds for a store on another machine. Raises
    `ConfigError` for an invalid address, for a missing secret, and if a store outside of the nodes
    is used without ``launch.job_id``.
    """
    endpoint = str(config.rdzv_endpoint)
    secret = find_secret(config.secret_file, config.insecure)
    try:
        host, port = split_endpoint(endpoint)
        interface = choose_interface(host)
        server = None
        if owns_address(host):
            addresses = []
            for _, address, _ in resolve(host):
                addresses.append(address)
            if config.node_range[1] > 1 and all(map(is_loopback, addresses)):
                raise ConfigError(
                    f"{host} is {addresses[0]} on this machine, which no other node reaches; give "
                    "the address or name that other nodes use"
                )
            # The port may be taken by another user's store, or by an earlier launcher here.
            with contextlib.suppress(PortTaken):
                server = StoreServer.at(host, port, secret, log_dropped_connection)
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
            f"the store at {endpoint} serves more than one job: name yours with launch.job_id, "
            "the same on all its nodes"
        )
    job, number = config.job_id or "parallel2d", 0
    while store.check([f"{_CLOSED}/{job}-{number}"]):
        number += 1
    return Rendezvous(store, secret, endpoint, server, interface, f"{job}-{number}")
