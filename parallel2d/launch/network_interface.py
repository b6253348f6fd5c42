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

from parallel2d.errors import ConfigError
from parallel2d.store.address import resolve

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

# An address of the endpoint, as `resolve` returns it: its family, its numeric form, the socket
# address.
_Target = tuple[socket.AddressFamily, str, tuple[Any, ...]]


class Interface(NamedTuple):
    """An interface of this machine (``eth0``) and the address on it (``10.0.0.1``, ``fd00::1``)."""

    name: str
    address: str


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
    chosen = _chosen_by_user(env, present)
    if chosen is None:
        if routed is not None:
            return routed
        addresses = sorted({address for _, address, _ in targets})
        raise ConfigError(
            f"no interface of {socket.gethostname()} leads to the endpoint {endpoint_host} "
            f"({', '.join(addresses)}); it has {_listing(present)}; set {GLOO} and {NCCL}"
        )
    if not chosen.interfaces:
        raise ConfigError(
            f"{chosen.variable}={chosen.value}: {socket.gethostname()} has no such interface that "
            f"is up and has an address; it has {_listing(present)}"
        )
    # NCCL's pattern may match several interfaces; the one that leads to the endpoint is preferred.
    if chosen.variable == NCCL and routed in chosen.interfaces:
        return routed
    # Without a route from here, the family that the endpoint itself prefers.
    family = targets[0][0] if routed is None else _family_of(routed.address)
    return _first_of_family(family, chosen.interfaces)


class _FirstChoice(NamedTuple):
    """A variable that the user set, and the interfaces that it allows."""

    variable: str
    value: str
    interfaces: list[Interface]


def _chosen_by_user(env: Mapping[str, str], present: list[Interface]) -> _FirstChoice | None:
    """The choice in GLOO_SOCKET_IFNAME, or else in NCCL_SOCKET_IFNAME, or None."""
    for_gloo = env.get(GLOO, "")
    names = _comma_separated(for_gloo)
    if names:
        # Gloo takes a list of names too, but one address is needed here: that of the first.
        named = [each for each in present if each.name == names[0]]
        return _FirstChoice(GLOO, for_gloo, named)
    for_nccl = env.get(NCCL, "").strip()
    if for_nccl:
        matching = [each for each in present if matches_nccl(for_nccl, each.name)]
        return _FirstChoice(NCCL, for_nccl, matching)
    return None


def _first_of_family(family: socket.AddressFamily, candidates: list[Interface]) -> Interface:
    """The first of ``candidates`` with an address of ``family``; where none has one, the first."""
    for each in candidates:
        if _family_of(each.address) == family:
            return each
    return candidates[0]


def choice_reason(endpoint_host: str, environment: Mapping[str, str] | None = None) -> str:
    """Why `choose_interface` takes what it takes, for a message: ``set in GLOO_SOCKET_IFNAME``,
    ``the route to node0``."""
    env = os.environ if environment is None else environment
    for name in (GLOO, NCCL):
        if env.get(name, "").strip():
            return f"set in {name}"
    return f"the route to {endpoint_host}"


def matches_nccl(pattern: str, name: str) -> bool:
    """Whether NCCL would use interface ``name`` under NCCL_SOCKET_IFNAME=``pattern``: ``eth`` is a
    prefix, ``=eth0`` a whole name, ``^docker`` everything but that prefix, ``^=eth3`` everything
    but that name; a comma separates alternatives. (NCCL's user guide, "Environment variables")"""
    exclude = pattern.startswith("^")
    words = pattern.removeprefix("^")
    # NCCL takes what follows a colon for a port number, which interfaces do not have.
    listed = [word.partition(":")[0] for word in _comma_separated(words.removeprefix("="))]
    if words.startswith("="):
        found = name in listed
    else:
        found = name.startswith(tuple(listed))
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
    if address.startswith(("127.", "::ffff:127.")):
        return True
    return address == "::1"


def _comma_separated(text: str) -> list[str]:
    """The words of ``text`` without the blanks around them and without empty ones."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _routed(targets: list[_Target], present: list[Interface]) -> Interface | None:
    """The one of ``present`` that leads to the first of ``targets`` with a route, or None."""
    by_address = {each.address: each for each in present}
    for family, _, target in targets:
        source = _source_address(family, target)
        if source in by_address:
            return by_address[source]
    return None


def _source_address(family: socket.AddressFamily, target: tuple[Any, ...]) -> str | None:
    """This machine's numeric address on the route to ``target``, a socket address; None when there
    is no route.

    Connecting a datagram socket sends nothing: the kernel looks up the route and sets the socket's
    own address.
    """
    # Any port will do. The rest of an IPv6 address is its flow and its scope.
    connected_to = (target[0], 9, *target[2:])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(connected_to)
            source = probe.getsockname()
        except OSError:
            return None
    return socket.getnameinfo(source, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def _listing(present: list[Interface]) -> str:
    """The interfaces for a message: ``eth0 (10.0.0.1), lo (127.0.0.1)``."""
    if not present:
        return "none that is up"
    return ", ".join(f"{name} ({address})" for name, address in present)


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
