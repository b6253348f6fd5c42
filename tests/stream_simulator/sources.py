"""The source file that issued an operation."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from typing import NamedTuple

PROJECT, MODEL, FSDP2, OPTIMIZER, AUTOGRAD, SCRIPT = (
    "project",
    "model",
    "fsdp2",
    "optimizer",
    "autograd",
    "script",
)
_STANDARD_LIBRARY, _PACKAGES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
# An editable install has the package in `sys.path` by a link, and its files by their real path.
_REPOSITORY = os.path.realpath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
_SIMULATOR = os.path.dirname(os.path.abspath(__file__)) + os.sep
# The source of a file by the start of its path below `sys.path`; the first row that fits. An
# operation of a file without a source belongs to the caller: these files only pass operations on,
# or measure them.
_SOURCES = (
    ("parallel2d/models/", MODEL),
    ("parallel2d/base/", None),
    ("parallel2d/training/metrics/", None),
    ("parallel2d/", PROJECT),
    ("torch/distributed/fsdp/", FSDP2),
    ("torch/optim/", OPTIMIZER),
    ("torch/autograd/graph.py", AUTOGRAD),
    ("torch/", None),
    ("", SCRIPT),
)


class Caller(NamedTuple):
    """The innermost frames that have a source."""

    source: str
    # The path of the file below its entry of `sys.path`
    file: str
    # The frames as text
    place: str

    @property
    def package(self) -> str:
        """The package of the file: two levels below ``parallel2d`` at most."""
        return ".".join(self.file.split("/")[:-1][:3])


@functools.cache
def _source_and_name(path: str) -> tuple[str | None, str]:
    """Return the source of a file, and its path below its entry of `sys.path`."""
    if path.startswith(("<", _SIMULATOR)):
        return None, path
    entries = (*sys.path, _STANDARD_LIBRARY, _REPOSITORY)
    roots = [each for each in entries if path.startswith(_as_folder(each))]
    root = max(roots, key=len, default="")
    name = path[len(root) :].lstrip("/")
    is_other_package = root == _PACKAGES and not name.startswith(("torch/", "parallel2d/"))
    if root == _STANDARD_LIBRARY or is_other_package:
        return None, name
    return next(source for start, source in _SOURCES if name.startswith(start)), name


def _as_folder(entry: str) -> str:
    return entry.rstrip("/") + "/" if entry else "\0"


def caller(frames: int = 3) -> Caller:
    """Return the source that issues the present operation, with its innermost ``frames`` frames."""
    frame, source, file = sys._getframe(1), "", ""
    shown: list[str] = []
    while frame is not None and len(shown) < frames:
        found, name = _source_and_name(frame.f_code.co_filename)
        if found is not None:
            if not shown:
                source, file = found, name
            shown.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return Caller(source, file, " < ".join(shown))
