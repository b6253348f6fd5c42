"""The documentation builds as a site without a warning; every key, name and page is in it; a page loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import parallel2d

ROOT = Path(__file__).parents[1]
LOADED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*"
)
IMPORTED = re.compile(r"(?:@import\s+|url\()[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built pages. Warnings are errors, among them links that lead nowhere and pages in no table of contents."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "tools.docs.site", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.extras("sphinx", "myst_parser", "furo")
def test_every_page_is_built_and_linked_from_the_first(site):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    index = (site / "index.html").read_text()
    for page in pages - {Path("index.md")}:
        assert (site / page).with_suffix(".html").is_file(), page
        assert f'href="{page.with_suffix(".html")}"' in index, page


@pytest.mark.extras("sphinx", "myst_parser", "furo")
def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert not LOADED.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not IMPORTED.search(style.read_text()), style


@pytest.mark.extras("sphinx", "myst_parser", "furo")
def test_every_key_and_public_name_has_an_entry(site):
    from parallel2d.config import documentation

    reference = (site / "configuration.html").read_text()
    text = re.sub(r"<[^>]+>", "", reference)
    for section in documentation.sections():
        for key in section.keys:
            assert key.key in text, key.key
    names = (site / "api.html").read_text()
    for name in parallel2d.__all__:
        assert name.startswith("__") or f'id="parallel2d.{name}"' in names, name
