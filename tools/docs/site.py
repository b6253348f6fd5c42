"""Build the documentation as a site. Every warning is an error.

pip install -e ".[docs]"
python -m tools.docs.site OUT
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def build(out: str) -> int:
    """Build the pages below ``out`` and return the exit code of sphinx-build."""
    return build_main(["-q", "-W", "--keep-going", "-b", "html", str(DOCS), out])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="the folder for the pages")
    sys.exit(build(parser.parse_args().out))
