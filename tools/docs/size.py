"""Print the size of the package and of its parts at given commits.

    python -m tools.docs.size COMMIT [COMMIT ...]

The number of lines depends on the formatting of the code; the numbers of statements and syntax
nodes do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter


def git(*words: str) -> str:
    return subprocess.run(("git", *words), capture_output=True, text=True, check=True).stdout


def measure(commit: str) -> tuple[Counter[str], Counter[str]]:
    """Count lines, statements and other parts of the package at a commit, and lines by subpackage."""
    total: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    for path in git("ls-tree", "-r", "--name-only", commit, "parallel2d").splitlines():
        if not path.endswith(".py"):
            continue
        text = git("show", f"{commit}:{path}")
        lines = text.splitlines()
        nodes = list(ast.walk(ast.parse(text)))
        total["files"] += 1
        total["lines"] += len(lines)
        total["blank lines"] += sum(not line.strip() for line in lines)
        total["comment lines"] += sum(line.strip().startswith("#") for line in lines)
        total["docstring lines"] += sum(map(_docstring_lines, nodes))
        total["import statements"] += sum(
            isinstance(node, ast.Import | ast.ImportFrom) for node in nodes
        )
        total["statements"] += sum(isinstance(node, ast.stmt) for node in nodes)
        total["syntax nodes"] += len(nodes)
        packages[path.split("/")[1]] += len(lines)
    return total, packages


def _docstring_lines(node: ast.AST) -> int:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(node, documented) or ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def _table(columns: dict[str, Counter[str]], rows: list[str]) -> None:
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for row in rows:
        print(f"| {row} | " + " | ".join(f"{column[row]:,}" for column in columns.values()) + " |")
    print()


def main(commits: list[str]) -> None:
    found = {commit: measure(commit) for commit in commits}
    totals = {commit: total for commit, (total, _) in found.items()}
    packages = {commit: by_package for commit, (_, by_package) in found.items()}
    last = packages[commits[-1]]
    _table(totals, list(totals[commits[-1]]))
    _table(packages, sorted(set().union(*packages.values()), key=lambda name: -last[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
