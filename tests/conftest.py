"""Fixtures: `ranks` runs a function on several gloo ranks. Marks: `extras` names the additional
packages of a test.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# the forked workers import test modules and `workers` by name
sys.path.insert(0, os.path.dirname(__file__))
# `tools` stands at the root of the repository, and some examples are parts of jobs
sys.path.append(os.path.dirname(os.path.dirname(__file__)))
sys.path.append(os.path.join(os.path.dirname(os.path.dirname(__file__)), "examples"))

# torch prints a C++ stack for every connection that breaks. Tests break many on purpose. Read when
# torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from workers import Pools

MARKS = ("slow", "soak", "extras")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow each test at most one of the marks, so that `-m slow`, `-m extras` and `-m soak` run
    disjoint sets of tests. A test that takes too long fails; soak tests have no time limit.
    """
    for item in items:
        given = {mark.name for mark in item.iter_markers() if mark.name in MARKS}
        assert len(given) <= 1, f"{item.nodeid} is marked {' and '.join(sorted(given))}; choose one"
        if "soak" in given:
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Pools that will run models of transformers import it once, before their workers are forked."""
    if importlib.util.find_spec("transformers") and any(
        item.get_closest_marker("extras") for item in session.items
    ):
        Pools.preload.append("transformers.modeling_utils")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if its mark `extras` names a module that is not installed."""
    for mark in item.iter_markers("extras"):
        for module in mark.args:
            pytest.importorskip(
                module, reason=f"{module} is not installed: pip install -e '.[test-extras]'"
            )


@pytest.fixture(autouse=True)
def _own_log_handlers() -> Iterator[None]:
    """Takes back the handlers that Hydra sets up in this process; their stream is closed when the
    test is over.
    """
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    root.handlers[:] = before


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a small ``corpus.txt``; most jobs of the tests run in one."""
    lines = [f"{i} times {i} is {i * i}\n" for i in range(12000)]
    (tmp_path / "corpus.txt").write_text("".join(lines))
    return tmp_path


# Python imports it at the start of every process of a job.
INSTALLED = """
import hanging_communicator
hanging_communicator.install(hanging_communicator.{})
"""


@pytest.fixture(params=["gloo", "Hanging"])
def communicator(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The kind of communicator across replicas, in all jobs that the test starts."""
    kind: str = request.param
    if kind != "gloo":
        folder = tmp_path_factory.mktemp("communicator")
        (folder / "sitecustomize.py").write_text(INSTALLED.format(kind))
        places = [str(folder), os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    return kind
