"""The documentation builds as a site without a warning; every key, name and page is in it; a page
loads nothing from elsewhere and is never wider than the window; a newcomer's questions are
answered.
"""

import html
import posixpath
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Browser, find_chromium

import parallel2d

ROOT = Path(__file__).parents[1]
LOADED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*"
)
IMPORTED = re.compile(r"(?:@import\s+|url\()[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built pages. Warnings are errors, among them links that lead nowhere and
    pages in no table of contents.
    """
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "tools.docs.site", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return out


# Question -> words of its answer, in the section that the first page links.
QUESTIONS = {
    "Which layout should I use?": "python -m parallel2d.plan",
    "Why was my mesh refused?": "mesh.allow_cross_node=true",
    "How do I use my own model?": "model=custom model.target=package.module:factory",
    "How do I use my own loop?": "build_mesh(strategy=",
    "How do I continue on fewer nodes?": "launch.nnodes=2:4",
    "What happens when a node dies?": "the other nodes continue without the replicas of this node",
    "How many bytes does a node send?": "1.5050",
    "How much does hybrid_full cost in bytes": "hybrid_full sends as many bytes as hybrid",
    "How do I export to Hugging Face?": "a folder for from_pretrained of transformers",
    "How do I run a sweep?": "-m optimizer.lr=1e-3,1e-2",
}
# An element of the article that has to be scrolled sideways or reaches beyond the window, and its
# widest child. The theme gives the scroll bar to `.content`, not to the body.
TOO_WIDE = """(() => {
  const width = window.innerWidth, article = document.querySelector("article");
  for (let node = article.closest(".content"); node; node = node.parentElement) {
    if (node.scrollWidth <= node.clientWidth + 1 && node.getBoundingClientRect().right <= width + 1) continue;
    const right = child => child.getBoundingClientRect().right;
    const widest = [...article.querySelectorAll("*")].sort((a, b) => right(b) - right(a))[0];
    return node.tagName + "." + node.className + ": " + widest.tagName + " " +
        widest.textContent.slice(0, 60);
  }
  return "";
})()"""


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", page)).split())


def body_of(site: Path, page: str) -> str:
    return (site / page).read_text().partition("<article")[2].partition("</article>")[0]


def pages_linked_in(site: Path, page: str) -> set[str]:
    links = re.findall(r'href="([^"#:]+\.html)', body_of(site, page))
    return {posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in links}


@pytest.mark.extras("sphinx", "myst_parser", "furo")
def test_every_page_is_built_and_linked_from_the_first(site):
    """Pages are linked in the navigation, and by links in the text from page to page."""
    sources = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    pages = {str(path.with_suffix(".html")) for path in sources} - {"index.html"}
    index = (site / "index.html").read_text()
    navigation = index.partition("sidebar-tree")[2].partition("</aside>")[0]
    for page in pages:
        assert (site / page).is_file(), page
        assert f'href="{page}"' in navigation, page
    found, new = set(), {"index.html"}
    while new:
        page = new.pop()
        found.add(page)
        new |= pages_linked_in(site, page) - found
    assert pages <= found, pages - found


@pytest.mark.extras("sphinx", "myst_parser", "furo")
@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_of_the_first_page_links_to_its_answer(site, question):
    rows = re.findall(r"<tr.*?</tr>", body_of(site, "index.html"), re.DOTALL)
    (row,) = [row for row in rows if question in text_of(row)]
    answers = []
    for link in re.findall(r'href="([^"]+)"', row):
        page, _, anchor = link.partition("#")
        section = body_of(site, page)
        if anchor:
            assert f'id="{anchor}"' in section, link
            # Up to the next heading of the same or a higher level.
            section = section.partition(f'id="{anchor}"')[2]
            level = re.search(r"<h(\d)", section)[1]
            start = section.index("</h")
            end = re.search(rf"<h[1-{level}]", section[start:])
            section = section[: start + end.start()] if end else section
        answers.append(text_of(section))
    assert any(QUESTIONS[question] in answer for answer in answers), answers[0][:500]


@pytest.mark.extras("sphinx", "myst_parser", "furo")
def test_no_page_is_wider_than_the_window(site, tmp_path):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("this machine has no Chromium")
    pages = sorted(path.relative_to(site) for path in site.rglob("*.html"))
    browser = Browser(chromium, tmp_path / "profile", width=1200, height=900)
    wide = []
    try:
        for page in pages:
            browser.open((site / page).as_uri())
            ready = f"document.readyState === 'complete' && location.href.endsWith('/{page}')"
            browser.wait_for(ready, bool)
            for width in (1200, 800, 400):
                browser.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=900,
                    deviceScaleFactor=1,
                    mobile=False,
                )
                assert browser.ask("window.innerWidth") == width
                too_wide = browser.ask(TOO_WIDE)
                if too_wide:
                    wide.append(f"{page} at {width} px: {too_wide}")
        # The question itself: something wide is noticed.
        browser.ask("document.querySelector('article p').style.minWidth = '3000px'")
        assert browser.ask(TOO_WIDE)
    finally:
        browser.close()
    assert not wide, "\n".join(wide)


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
    from parallel2d.base.config.help_page import sections

    reference = (site / "configuration.html").read_text()
    text = re.sub(r"<[^>]+>", "", reference)
    for section in sections():
        for key in section.keys:
            assert key.key in text, key.key
    names = (site / "api.html").read_text()
    for name in parallel2d.__all__:
        assert name.startswith("__") or f'id="parallel2d.{name}"' in names, name
