"""Check the English of pages, docstrings, comments and names against limits.

    python -m tools.docs.prose                  # the checked roots; exit status 1 above a limit
    python -m tools.docs.prose PATH ...         # other files and folders, with the same limits
    python -m tools.docs.prose --list PATH ...  # print every match

The limits in `RULES` are matches per 1,000 words of docstrings and comments. The limits for pages
are twice as high. torch's `_fully_shard` and torchtitan have figures near zero for all rules.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The limits apply to all these roots together.
CHECKED = ("README.md", "CONTRIBUTING.md", "docs", "examples", "models", "parallel2d", "tools")

RULES = {
    "what-clause: use a noun": (r"\bwhat(?:ever)?\b", 1.0),
    "those of, that of: name the thing": (
        r"\b(?:those|that) (?:of|who|which|that|with|where|at|in|on|from|for)\b",
        0.8,
    ),
    "person word for a process": (r"\bwho(?:m|ever|se)?\b|\b(?:no|some|any|every)body\b", 0.6),
    "is no X: is not an X": (r"\b(?:is|are|was|were) no\b", 0.2),
    "go on: continue": (r"\b(?:go(?:es|ing)?|went) on\b", 0.1),
    "of its own: separate, custom": (r"\bof (?:one's|its|their) own\b", 0.3),
    "beside: next to, in addition to": (r"\bbeside\b", 0.1),
    "anew, alone, told: again, only, received": (
        r"\b(?:anew|alone|told|thereof|therein|whereof)\b",
        0.3,
    ),
    "in which: a shorter sentence": (r"\b(?:at|in|by|of|to|from|on|over) which\b", 0.6),
}
OPENING = re.compile(
    r"\s*(?:What|Whether|Has|Lets|Makes|Those|That|Of|As|The same|In|To|Where|When|How|Whose|Which"
    r"|Who|From|Until|Before|Between)\b"
)
OPENINGS = "docstring without a verb or noun at its start"
OPENING_LIMIT = 0.02  # share of the docstrings
FIELD = re.compile(r"``\w+``:")
FIELDS = "fields in a running paragraph: one line each"
FIELDS_LIMIT = 10
NAME = re.compile(
    r"(?:^|_)(?:what|told|beside|anew|alone|whole|who|those|comes|goes|kept|taken|given|held|ones"
    r"|there)(?:_|$)"
)
NAMES = "name of a function or class"
NAMES_LIMIT = 8
DIRECTIVE = re.compile(r"#\s*(?:type:|noqa|fmt:|!|pyrefly|mypy)")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Report:
    """Number of words, and the number and places of matches, in a group of files."""

    words: int = 0
    docstrings: int = 0
    matches: Counter[str] = field(default_factory=Counter)  # by rule
    places: list[str] = field(default_factory=list)

    def add(self, rule: str, path: Path, line: int, excerpt: str) -> None:
        self.matches[rule] += 1
        self.places.append(f"{path}:{line}: {rule}: {' '.join(excerpt.split())}")

    def add_prose(self, path: Path, line: int, text: str) -> None:
        """Count the words and the matches of a text that starts at ``line``."""
        self.words += len(re.findall(r"[A-Za-z']+", text))
        for rule, (pattern, _) in RULES.items():
            for match in re.finditer(pattern, text, re.IGNORECASE):
                start, end = match.span()
                excerpt = text[max(0, start - 40) : end + 30]
                self.add(rule, path, line + text[:start].count("\n"), excerpt)

    def over_limit(self, factor: float) -> list[str]:
        """Return a line for each exceeded limit; ``factor`` multiplies the limits of `RULES`."""
        rates = {
            rule: (1000 * self.matches[rule] / max(self.words, 1), factor * limit)
            for rule, (_, limit) in RULES.items()
        }
        rates[OPENINGS] = (self.matches[OPENINGS] / max(self.docstrings, 1), OPENING_LIMIT)
        rates[FIELDS] = (self.matches[FIELDS], FIELDS_LIMIT)
        rates[NAMES] = (self.matches[NAMES], NAMES_LIMIT)
        return [
            f"{rate:.3f} exceeds {limit:g}: {rule}"
            for rule, (rate, limit) in rates.items()
            if rate > limit
        ]


def read_module(report: Report, path: Path) -> None:
    """Add the docstrings, comments and names of a module."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Documented):
            continue
        if not isinstance(node, ast.Module) and NAME.search(node.name):
            report.add(NAMES, path, node.lineno, node.name)
        text = ast.get_docstring(node, clean=False)
        if text is None:
            continue
        line = node.body[0].lineno
        report.docstrings += 1
        if OPENING.match(text):
            report.add(OPENINGS, path, line, text.strip().splitlines()[0])
        if any(len(FIELD.findall(part)) > 1 for part in re.split(r"\n\s*\n", text)):
            report.add(FIELDS, path, line, "")
        report.add_prose(path, line, without_code(text))
    for line, text in comments(source):
        report.add_prose(path, line, without_code(text))


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            yield token.start[0], token.string.lstrip("# ")


def without_code(text: str) -> str:
    return re.sub(r"``?[^`]*``?", _blank, text)


def read_page(report: Report, path: Path) -> None:
    """Add a page without its code."""
    text = re.sub(r"```.*?```", _blank, path.read_text(encoding="utf-8"), flags=re.DOTALL)
    code = r"`[^`\n]*`|^    .*$|\(https?://[^)]*\)"
    report.add_prose(path, 1, re.sub(code, _blank, text, flags=re.MULTILINE))


def _blank(code: re.Match[str]) -> str:
    return " " + "\n" * code[0].count("\n")


def check(roots: list[Path]) -> tuple[Report, Report]:
    """Return the reports of the modules and of the pages below ``roots``."""
    modules, pages = Report(), Report()
    for root in roots:
        paths = sorted(root.rglob("*")) if root.is_dir() else [root]
        for path in paths:
            if path.suffix == ".py":
                read_module(modules, path)
            elif path.suffix == ".md":
                read_page(pages, path)
    return modules, pages


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--list", action="store_true", help="print every match")
    options = parser.parse_args()
    modules, pages = check(options.paths or [ROOT / name for name in CHECKED])
    problems = [*modules.over_limit(1), *(f"pages: {line}" for line in pages.over_limit(2))]
    if options.list or problems:
        print("\n".join([*modules.places, *pages.places]))
    print("\n".join(problems) or f"{modules.words + pages.words} words, every limit met")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
