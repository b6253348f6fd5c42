"""Chooses the network interface that training uses: `choose_interface`.

[Note: which interface] Unless a variable names one, gloo takes whatever address this machine's own
host name resolves to (often loopback), and NCCL takes the first interface that is up, in an order
of its own. The interface that leads to the endpoint is one over which the nodes reach each other,
so that one is chosen; what the user set in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is kept.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil

from parallel2d.base.errors import ConfigError
from parallel2d.base.store.address import resolve

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class Interface(NamedTuple):
    """An interface of this machine (``eth0``) and the address on it (``10.0.0.1``, ``fd00::1``)."""

    name: str
    address: str

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def choose_interface(endpoint_host: str, environment: Mapping[str, str] | None = None) -> Interface:
    """The interface that gloo and NCCL should use to meet the other nodes, and this machine's
    address on it.

    ``endpoint_host``: the host of the rendezvous endpoint, a name or an address; on that node
    itself, the interface that holds the address. GLOO_SOCKET_IFNAME wins, then NCCL_SOCKET_IFNAME,
    then the route to the endpoint. The address is of the endpoint's family where the interface has
    one. Raises `ConfigError` for an interface that does not exist or has no address, and when no
    interface leads to the endpoint. See [Note: which interface].
    """
    env = os.environ if environment is None else environment
    present = list_interfaces()
    targets = resolve(endpoint_host)
    routed = _routed(targets, present)
    variable = _variable_set(env)
    if variable is None:
        if routed is None:
            addresses = ", ".join(sorted({address for _, address, _ in targets}))
            raise ConfigError(
                f"no interface of {socket.gethostname()} leads to the endpoint {endpoint_host} "
                f"({addresses}); it has {_listing(present)}; set {GLOO} and {NCCL}"
            )
        return routed
    allowed = _allowed(present, variable, env[variable])
    # NCCL's pattern may match several interfaces; the one that leads to the endpoint is preferred.
    if variable == NCCL and routed in allowed:
        return routed
    # Without a route from here, the family that the endpoint itself prefers.
    family = routed.family if routed else targets[0][0]
    of_family = [each for each in allowed if each.family == family]
    return (of_family or allowed)[0]


def _allowed(present: list[Interface], variable: str, value: str) -> list[Interface]:
    """Finds what of ``present`` a variable names. Raises `ConfigError` for nothing."""
    if variable == GLOO:
        # Gloo takes a list of names too, but one address is needed here: that of the first.
        name = value.strip(" ,").split(",")[0].strip()
        found = [each for each in present if each.name == name]
    else:
        found = [each for each in present if matches_nccl(value, each.name)]
    if not found:
        raise ConfigError(
            f"{variable}={value}: {socket.gethostname()} has no such interface that is up and has "
            f"an address; it has {_listing(present)}"
        )
    return found


def _listing(present: list[Interface]) -> str:
    """For a message: ``eth0 (10.0.0.1), lo (127.0.0.1)``."""
    return ", ".join(f"{each.name} ({each.address})" for each in present) or "none that is up"


def _variable_set(env: Mapping[str, str]) -> str | None:
    return next((name for name in (GLOO, NCCL) if env.get(name, "").strip(" ,")), None)


def choice_reason(endpoint_host: str, environment: Mapping[str, str] | None = None) -> str:
    """Why `choose_interface` takes what it takes, for a message: ``set in GLOO_SOCKET_IFNAME``,
    ``the route to node0``."""
    variable = _variable_set(os.environ if environment is None else environment)
    return f"set in {variable}" if variable else f"the route to {endpoint_host}"


def matches_nccl(pattern: str, name: str) -> bool:
    """Whether NCCL would use interface ``name`` under NCCL_SOCKET_IFNAME=``pattern``: ``eth`` is a
    prefix, ``=eth0`` a whole name, ``^docker`` everything but that prefix, ``^=eth3`` everything
    but that name; a comma separates alternatives. (NCCL's user guide, "Environment variables")"""
    exclude = pattern.strip().startswith("^")
    words = pattern.strip().removeprefix("^")
    # NCCL takes what follows a colon for a port number, which interfaces do not have.
    listed = [word.partition(":")[0].strip() for word in words.removeprefix("=").split(",")]
    listed = [word for word in listed if word]
    found = name in listed if words.startswith("=") else name.startswith(tuple(listed))
    return found != exclude


def list_interfaces() -> list[Interface]:
    """Every address of every interface that is up, IPv4 before IPv6, as the system lists them;
    loopback last."""
    is_up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if name in is_up and each.family in (socket.AF_INET, socket.AF_INET6):
                found.append(Interface(name, each.address))
    return sorted(found, key=lambda each: (is_loopback(each.address), ":" in each.address))


def is_loopback(address: str) -> bool:
    """Whether a numeric address stays inside the machine."""
    # The second prefix is that of IPv4 addresses in IPv6 notation.
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def _routed(
    targets: list[tuple[socket.AddressFamily, str, tuple[Any, ...]]], present: list[Interface]
) -> Interface | None:
    """The one of ``present`` that leads to the first of ``targets``, as `resolve` returns them,
    with a route; or None.

    Connecting a datagram socket sends nothing: the kernel looks up the route and sets the socket's
    own address.
    """
    by_address = {each.address: each for each in present}
    for family, _, target in targets:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                # Any port will do. The rest of an IPv6 address is its flow and its scope.
                probe.connect((target[0], 9, *target[2:]))
            except OSError:
                continue
            numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
            source = socket.getnameinfo(probe.getsockname(), numeric)[0]
        if source in by_address:
            return by_address[source]
    return None
