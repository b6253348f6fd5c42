"""docs/troubleshooting.md quotes messages: each of them stands in the source of the package, or in
torch's libraries.
"""

import ast
import functools
import mmap
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ENTRY = re.compile(r"^`(.+)`\n: ", re.MULTILINE)
OWN, OF_TORCH = PAGE.split("## Messages of torch")


def quoted(text: str) -> list[str]:
    return ENTRY.findall(text)


@functools.cache
def templates() -> list[str]:
    """Every text of the package's source, with ``…`` for the values that are filled in when it is
    raised.
    """
    found = []
    for path in (ROOT / "parallel2d").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    # A page has no line breaks in a message.
    return [" ".join(text.split()) for text in found]


def is_in_source(message: str) -> bool:
    """Return True if a text of the source has the fixed parts of ``message``, in their order and
    with the same words between them; ``…`` stands for any words.
    """
    parts = [re.escape(part) for part in message.split("…")]
    pattern = re.compile(".*".join(parts))
    return any(pattern.search(template) for template in templates())


def test_documented_messages_are_unique():
    messages = quoted(PAGE)
    assert len(messages) >= 60
    assert len(set(messages)) == len(messages)
    # A message that is nearly all `…` would match any text.
    for message in messages:
        assert len(message.replace("…", "").strip()) >= 10, message


def test_documented_message_is_in_the_source():
    missing = [message for message in quoted(OWN) if not is_in_source(message)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("message", quoted(OF_TORCH))
def test_documented_torch_message_is_in_torch_libraries(message):
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        with (folder / name).open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(message.encode()) >= 0:
                    return
    pytest.fail(f"{message} is not in torch {torch.__version__}")
