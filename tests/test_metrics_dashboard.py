"""The dashboard as a person sees it: a finished sweep, shown by TensorBoard, looked at with a browser."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.request

import pytest
from browser import Browser, find_chromium
from listening import free_port
from test_command_line import SMALL, environment, execute, folder  # noqa: F401

from parallel2d.training.metrics.writer import BETWEEN_REPLICAS, COMPARED, LAYOUT

# Everything below ``node``, shadow trees and slots included
DEEP = """
const deep = (node, wanted, found = []) => {
  if (node.matches && node.matches(wanted)) found.push(node);
  for (const child of [...(node.shadowRoot ? [node.shadowRoot] : []), ...(node.childNodes || [])])
    deep(child, wanted, found);
  return found;
};
const text = node => node.nodeType === 3 ? node.data
  : [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes]
      .filter(n => !['STYLE', 'SCRIPT', 'TEMPLATE'].includes(n.tagName)).map(text).join(' ')
      .replace(/\\s+/g, ' ').trim();
"""
# [title, colours of the lines drawn] of each panel
PANELS = f"""(() => {{ {DEEP}
  return deep(document, 'tf-custom-scalar-multi-line-chart-card').map(card => [
    text(deep(card, 'tf-card-heading')[0]),
    deep(card, 'path.line').filter(path => (path.getAttribute('d') || '').length > 2)
      .map(path => getComputedStyle(path).stroke)]);
}})()"""
TABLE = (
    f"(() => {{ {DEEP} return deep(document, 'tf-hparams-table-view').map(text).join(' '); }})()"
)


@contextlib.contextmanager
def dashboard(runs):
    port = free_port()
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port)]
    server = subprocess.Popen(
        words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        end, count = time.monotonic() + 240, len({path.parent for path in runs.rglob("events.*")})
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://localhost:{port}/data/runs") as answer,
            ):
                if len(json.loads(answer.read() or "[]")) == count:
                    break
            assert server.poll() is None, server.stderr.read()
            assert time.monotonic() < end, "the dashboard did not answer"
            time.sleep(0.1)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.communicate(timeout=240)


@pytest.fixture(scope="module")
def chromium():
    program = find_chromium()
    if program is None:
        pytest.skip("needs a chromium to look at the dashboard with: apt-get install chromium")
    return program


@pytest.mark.extras
def test_a_sweep_shows_no_empty_panel_and_every_run_in_the_table(chromium, folder):  # noqa: F811
    words = (
        "strategy=zero3,hybrid",
        "launch.nproc_per_node=4",
        "metrics.console=silent",
        "hydra.sweep.dir=sweep",
    )
    done = execute(folder, "-m", *SMALL, *words)
    assert done.returncode == 0, done.stderr
    charts = [name for group in (*LAYOUT.values(), BETWEEN_REPLICAS) for name in group]
    with dashboard(folder / "sweep") as address:
        browser = Browser(chromium, folder / "profile", height=2600)
        try:
            browser.open(f"{address}/#custom_scalars")
            panels = browser.wait_for(
                PANELS, lambda found: len(found) == len(charts) and all(lines for _, lines in found)
            )
            assert [title for title, _ in panels] == charts
            # The shard axis of zero3, and both of hybrid
            megabytes = dict(panels)["MB sent per rank and step"]
            assert len(set(megabytes)) == 3, megabytes
            browser.open(f"{address}/#hparams")
            table = browser.wait_for(TABLE, lambda text: "zero3" in text and "hybrid" in text)
            measured = ("validation/loss", "loss", "throughput/tokens_per_s", "goodput/fraction")
            for wanted in (*COMPARED, *measured):
                assert wanted in table, wanted
            # Whole numbers, and the mesh that was found
            assert " 2 2 hybrid 1 " in table
            assert " 1 4 zero3 1 " in table
            assert "auto" not in table
            assert browser.said == []
        finally:
            browser.close()
