"""Print the wall seconds and CPU-seconds of the tests by file and kind, and the behaviour that each
file tests.

    python tools/tests/time.py                    # the tests that `python -m pytest` runs
    python tools/tests/time.py slow extras        # these kinds instead
    python tools/tests/time.py --slowest 30       # also single tests
    python tools/tests/time.py --list             # runs nothing: files, the guarded behaviour, names of tests

The guarded behaviour comes from the table in tests/README.md. CPU-seconds include pytest and all its descendants.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from measure import RESULTS

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("default", "slow", "extras", "soak")


def guarded() -> dict[str, str]:
    """Return file -> guarded behaviour, from the table in tests/README.md."""
    text = (ROOT / "tests" / "README.md").read_text()
    return dict(re.findall(r"^\| `(test_\w+\.py)` \| (.+?) \|$", text, re.MULTILINE))


def run(kind: str) -> list[dict[str, Any]]:
    """Run the tests of a kind; return a row for each test."""
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "times.jsonl")
        words = [] if kind == "default" else ["-m", kind]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), RESULTS: results}
        subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "measure", *words], cwd=ROOT, env=environment
        )
        with open(results) as file:
            return [json.loads(line) for line in file]


def show(kind: str, rows: list[dict[str, Any]], slowest: int) -> None:
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        files[row["test"].partition("::")[0].rpartition("/")[2]].append(row)
    guards = guarded()
    print(
        f"\n{kind}: {len(rows)} tests, {sum(r['wall'] for r in rows):.0f} s, {sum(r['cpu'] for r in rows):.0f} CPU-s"
    )
    print(f"{'tests':>5} {'s':>6} {'CPU-s':>6}  file and guarded behaviour")
    for name, own in sorted(files.items(), key=lambda item: -sum(row["wall"] for row in item[1])):
        wall, cpu = (sum(row[key] for row in own) for key in ("wall", "cpu"))
        print(
            f"{len(own):5} {wall:6.1f} {cpu:6.1f}  {name}: {guards.get(name, 'not in tests/README.md')}"
        )
    for row in sorted(rows, key=lambda row: -row["wall"])[:slowest]:
        print(f"      {row['wall']:6.1f} {row['cpu']:6.1f}  {row['test']}")


def list_tests() -> None:
    for name, guards in guarded().items():
        print(f"{name}: {guards}")
        for found in re.findall(
            r"^def test_(\w+)", (ROOT / "tests" / name).read_text(), re.MULTILINE
        ):
            print(f"    {found.replace('_', ' ')}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", default=["default"], metavar="KIND", help=f"of {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--slowest", type=int, default=0, help="how many single tests to print, the slowest first"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the guarded behaviour and the tests of each file; run nothing",
    )
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"{', '.join(unknown)} is not one of {', '.join(KINDS)}")
    if options.list:
        list_tests()
        return
    for kind in options.kinds:
        show(kind, run(kind), options.slowest)


if __name__ == "__main__":
    main()
