"""Chooses the network interface that training uses: `choose_interface`.

[Note: which interface] Unless a variable names one, gloo takes whatever address this machine's own
host name resolves to (often loopback), and NCCL takes the first interface that is up, in an order
of its own. The interface that leads to the endpoint is one over which the nodes reach each other,
so that one is chosen; what the user set in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is kept.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import psutil

from parallel2d.base.errors import ConfigError
from parallel2d.base.store.address import resolve

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class Interface(NamedTuple):
    """An interface of this machine (``eth0``) and the address on it (``10.0.0.1``, ``fd00::1``)."""

    name: str
    address: str

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def choose_interface(endpoint_host: str, environment: Mapping[str, str] = os.environ) -> Interface:
    """The interface over which gloo and NCCL reach other nodes, and this machine's address on it.
    ``endpoint_host``: the host of the rendezvous endpoint, a name or an address; on that node
    itself, the interface that holds the address. GLOO_SOCKET_IFNAME wins, then NCCL_SOCKET_IFNAME,
    then the route to the endpoint. The address is of the endpoint's family where the interface has
    one. Raises `ConfigError` for an interface that does not exist or has no address, and when no
    interface leads to the endpoint. See [Note: which interface]."""
    present, targets = list_interfaces(), resolve(endpoint_host)
    listing = ", ".join(map("{0.name} ({0.address})".format, present)) or "none that is up"
    routed = _routed(targets, present)
    values = {name: environment.get(name, "").strip(" ,") for name in (GLOO, NCCL)}
    variable = next(filter(values.get, values), "")
    matches, value = _MATCHES[variable], values.get(variable, "")
    allowed = [each for each in present if matches(value, each.name)]
    # NCCL's pattern may match several; the one that leads to the endpoint is preferred.
    if routed in allowed and variable != GLOO:
        return routed
    if not variable:
        addresses = ", ".join(sorted({address for _, address, _ in targets}))
        raise ConfigError(
            f"no interface of {socket.gethostname()} leads to the endpoint {endpoint_host} "
            f"({addresses}); it has {listing}; set {GLOO} and {NCCL}"
        )
    if not allowed:
        raise ConfigError(
            f"{variable}={environment[variable]}: {socket.gethostname()} has no such interface "
            f"that is up and has an address; it has {listing}"
        )
    # Without a route from here, the family that the endpoint itself prefers; where the interface
    # has no address of it, its first address.
    family = routed.family if routed else targets[0][0]
    return min(allowed, key=lambda each: each.family != family)


def matches_nccl(pattern: str, name: str) -> bool:
    """Whether NCCL would use interface ``name`` under NCCL_SOCKET_IFNAME=``pattern``: ``eth`` is a
    prefix, ``=eth0`` a whole name, ``^docker`` everything but that prefix, ``^=eth3`` everything
    but that name; a comma separates alternatives. (NCCL's user guide, "Environment variables")"""
    exclude = pattern.strip().startswith("^")
    words = pattern.strip().removeprefix("^")
    # NCCL takes what follows a colon for a port number, which interfaces do not have.
    listed = [word.partition(":")[0].strip() for word in words.removeprefix("=").split(",")]
    alternatives = tuple(filter(None, listed))
    found = name in listed if words.startswith("=") else name.startswith(alternatives)
    return found != exclude


# Whether an interface is one that the value of a variable names; without a variable any is.
_MATCHES: dict[str, Callable[[str, str], bool]] = {
    # Gloo takes a list of names too, but one address is needed here: that of the first.
    GLOO: lambda value, name: value.split(",")[0].strip() == name,
    NCCL: matches_nccl,
    "": lambda value, name: True,
}


def list_interfaces() -> list[Interface]:
    """Every address of every interface that is up, IPv4 before IPv6; loopback last."""
    states, found = psutil.net_if_stats(), []
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and states[name].isup:
            of_internet = filter(lambda each: each.family in _INTERNET, addresses)
            found += [Interface(name, each.address) for each in of_internet]
    return sorted(found, key=lambda each: (is_loopback(each.address), ":" in each.address))


def is_loopback(address: str) -> bool:
    """Whether a numeric address stays inside the machine."""
    # The second prefix is that of IPv4 addresses in IPv6 notation.
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def _routed(
    targets: list[tuple[socket.AddressFamily, str, tuple[Any, ...]]], present: list[Interface]
) -> Interface | None:
    """Finds the one of ``present`` that leads to the first of ``targets`` with a route; or None.
    Connecting a datagram socket sends nothing: the kernel looks up the route and sets the socket's
    own address."""
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
