"""Manages the folders and namespaces of clusters on this machine. `clean` removes those whose owner
has ended.

Each cluster has one folder ``/tmp/p2d-cluster-TAG`` with ``state.json`` (owner's pid and start
time, subnet) and namespaces named ``p2d-TAG-HOST``. Processes of a node end with their owner;
folders and namespaces stay until `clean` removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.cluster.network import PREFIX, ClusterError, delete_namespaces, free_subnet, namespaces

ROOT = Path("/tmp")
_FOLDER = "p2d-cluster-"


def exit_on_signals() -> None:
    """Exit with code 128 + number on SIGINT, SIGTERM and SIGHUP, so that ``with`` blocks end."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: Any) -> None:
        for each in asked:
            signal.signal(each, signal.SIG_IGN)  # a further signal must not interrupt the clean-up
        sys.exit(128 + number)

    for each in asked:
        signal.signal(each, end)


def _started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot. The pid and the start time
    together identify a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Hold a lock inside the context, so that only one process at a time chooses a subnet or
    removes clusters."""
    handle = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def states() -> dict[str, dict[str, Any]]:
    """Return tag -> state of every cluster with a folder. ``alive`` is True while the owner runs."""
    found = {}
    for folder in ROOT.glob(f"{_FOLDER}*"):
        try:
            state = json.loads((folder / "state.json").read_text())
        except (OSError, ValueError):
            state = {"pid": 0, "started": None, "subnet": None}
        state["alive"] = state["started"] is not None and _started(state["pid"]) == state["started"]
        found[folder.name.removeprefix(_FOLDER)] = state
    return found


def reserve(hosts: list[str]) -> tuple[str, Path, Any]:
    """Return a new tag, its folder with the state, and a subnet that no other cluster uses."""
    with _locked():
        tag = f"{os.getpid()}x{random.SystemRandom().randrange(16**4):04x}"
        taken = [state["subnet"] for state in states().values() if state["subnet"]]
        subnet = free_subnet(random.SystemRandom().sample(range(1, 65535), 64), taken)
        folder = ROOT / f"{_FOLDER}{tag}"
        folder.mkdir(mode=0o755)
        state = {
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "subnet": str(subnet),
            "hosts": hosts,
        }
        (folder / "state.json").write_text(json.dumps(state))
    return tag, folder, subnet


def remove(tag: str) -> list[str]:
    """Remove the namespaces and the folder of one cluster. Return their names."""
    removed = delete_namespaces(tag)
    folder = ROOT / f"{_FOLDER}{tag}"
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(str(folder))
    return removed


def clean() -> list[str]:
    """Remove the namespaces and folders of all clusters whose owner has ended. Return their
    names."""
    with _locked():
        known = states()
        tags = {tag for tag, state in known.items() if not state["alive"]}
        for name in namespaces():
            prefix, _, rest = name.partition("-")
            tag, _, host = rest.rpartition("-")
            owner = tag.partition("x")[0]
            if (
                prefix == PREFIX
                and host
                and owner.isdigit()
                and "x" in tag
                and tag not in known
                and _started(int(owner)) is None
            ):
                tags.add(tag)
        failures, removed = [], []
        for tag in sorted(tags):
            try:
                removed += remove(tag)
            except ClusterError as error:
                failures.append(str(error))
    if failures:
        raise ClusterError("; ".join(failures))
    return removed
