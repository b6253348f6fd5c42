"""Chooses the network interface for training: `choose_interface`.

[Note: choice of the interface] If no variable names an interface, gloo uses the address that this
machine's host name resolves to (often loopback), and NCCL uses an interface of its own choice. The
nodes can reach each other over the interface that leads to the endpoint, so `choose_interface`
returns this interface. A value that the user has set in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME
has precedence.
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
    """An interface of this machine, such as ``eth0``, and one of its addresses, such as
    ``10.0.0.1`` or ``fd00::1``."""

    name: str
    address: str

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def choose_interface(endpoint_host: str, environment: Mapping[str, str] = os.environ) -> Interface:
    """Choose the interface for gloo and NCCL; see [Note: choice of the interface].

    GLOO_SOCKET_IFNAME takes precedence, then NCCL_SOCKET_IFNAME, then the route to the endpoint. On
    the endpoint's node the route leads to the interface with the address of the endpoint. If
    possible, the returned address belongs to the endpoint's address family.

    Args:
        endpoint_host: the host of the rendezvous endpoint, a name or an address.
        environment: the environment variables.

    Raises `ConfigError` for an interface that does not exist or lacks an address, and if no
    interface leads to the endpoint.
    """
    present, targets = list_interfaces(), resolve(endpoint_host)
    listing = ", ".join(map("{0.name} ({0.address})".format, present)) or "none that is up"
    routed = _routed(targets, present)
    values = {}
    for name in (GLOO, NCCL):
        values[name] = environment.get(name, "").strip(" ,")
    variable = next(filter(values.get, values), "")
    matches, value = _MATCHES[variable], values.get(variable, "")
    allowed = [each for each in present if matches(value, each.name)]
    # NCCL's pattern may match several interfaces; the interface with the route is preferred.
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
    # Without a route, prefer the endpoint's first address family; if the interface has no address
    # in this family, use its first address.
    family = routed.family if routed else targets[0][0]
    return min(allowed, key=lambda each: each.family != family)


def matches_nccl(pattern: str, name: str) -> bool:
    """True if NCCL would use interface ``name`` with NCCL_SOCKET_IFNAME=``pattern``: ``eth`` is a
    prefix, ``=eth0`` an exact name, ``^docker`` everything except this prefix, ``^=eth3``
    everything except this name; commas separate alternatives. (NCCL's user guide, "Environment
    variables")"""
    exclude = pattern.strip().startswith("^")
    words = pattern.strip().removeprefix("^")
    # NCCL takes the text after a colon for a port number, which interfaces do not have.
    listed = []
    for word in words.removeprefix("=").split(","):
        listed.append(word.partition(":")[0].strip())
    alternatives = tuple(filter(None, listed))
    found = name in listed if words.startswith("=") else name.startswith(alternatives)
    return found != exclude


# Variable -> function that is True if the variable's value names the interface. The key "" is for
# no variable: any interface matches.
_MATCHES: dict[str, Callable[[str, str], bool]] = {
    # Gloo also accepts a list of names. One address is needed here, so the first name is used.
    GLOO: lambda value, name: value.split(",")[0].strip() == name,
    NCCL: matches_nccl,
    "": lambda value, name: True,
}


def list_interfaces() -> list[Interface]:
    """Return every address of every interface that is up, IPv4 before IPv6, loopback last."""
    states, found = psutil.net_if_stats(), []
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and states[name].isup:
            of_internet = filter(lambda each: each.family in _INTERNET, addresses)
            found += [Interface(name, each.address) for each in of_internet]
    return sorted(found, key=lambda each: (is_loopback(each.address), ":" in each.address))


def is_loopback(address: str) -> bool:
    """True if a numeric address stays inside the machine."""
    # The second prefix is the IPv6 notation of IPv4 loopback addresses.
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def _routed(
    targets: list[tuple[socket.AddressFamily, str, tuple[Any, ...]]], present: list[Interface]
) -> Interface | None:
    """Return the interface in ``present`` that leads to the first of ``targets`` with a route, or
    None. Connecting a datagram socket sends nothing: the kernel looks up the route, and sets the
    address of the socket to the address of the interface."""
    by_address = {}
    for each in present:
        by_address[each.address] = each
    for family, _, target in targets:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                # Any port works. The last two values of an IPv6 target are its flow label and its
                # scope.
                probe.connect((target[0], 9, *target[2:]))
            except OSError:
                continue
            numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
            source = socket.getnameinfo(probe.getsockname(), numeric)[0]
        if source in by_address:
            return by_address[source]
    return None
