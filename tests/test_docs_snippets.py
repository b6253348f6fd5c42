"""The Python blocks of README.md and docs/ run unchanged, most on two ranks, with small values for
the names that a reader supplies.
"""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parallel2d
from parallel2d import MeshSpec, ParallelConfig, build_mesh, parallelize
from parallel2d.base import config as config_module

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Page and a word of the block's first line -> why it does not run here
ELSEWHERE = {
    ("coming-from.md", ""): "test_coming_from.py runs every row of this page",
    ("coming-from-scripts.md", ""): "test_coming_from.py runs these scripts",
    ("cluster.md", "tools.cluster"): "needs network namespaces; test_cluster.py has these names",
    ("models.md", "functools"): "needs peft; test_adapters.py",
    ("data.md", "datasets"): "reads a data set of the Hub; test_data_iterables.py",
    ("tutorial.md", "import torch"): "reads the export of a long run; test_library_export.py",
}


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for language, code in BLOCK.findall(page.read_text()):
            if language == "python" and _reason(page.name, code) is None:
                found.append((page.name, code))
    return found


def _reason(page: str, code: str) -> tuple[str, str] | None:
    first = code.splitlines()[0]
    return next((key for key in ELSEWHERE if key[0] == page and key[1] in first), None)


def first_line(block: Any) -> str:
    page, code = block
    return f"{page}: {code.splitlines()[0][:60]}"


class MyModel(nn.Module):
    def __init__(self, _config: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))


def summed_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return parallel2d.cross_entropy_sum(model(batch), batch)


def names_of(code: str) -> dict[str, Any]:
    """Return the names that the block uses and does not define."""
    used = set(re.findall(r"\w+", code))
    names: dict[str, Any] = {name: getattr(parallel2d, name) for name in parallel2d.__all__}
    names |= {name: kind for name, kind in vars(config_module).items() if isinstance(kind, type)}
    x = torch.arange(8).reshape(4, 2) % 8
    micro = SimpleNamespace(inputs=x, targets=x)
    names |= {
        "torch": torch,
        "MyModel": MyModel,
        "x": x,
        "config": ParallelConfig("hybrid"),
        "micro_batches": [micro, micro],
        "valid_tokens_on_this_rank": 16,
        "batches": [x, x],
        "loss": summed_loss,
        "batch": x,
        "validate": lambda model: model(x),
        "steps": 2,
        "samples": 4,
        "position_of_the_checkpoint": 0,
    }
    if not dist.is_initialized():
        return names
    mesh = build_mesh(MeshSpec(replicate=dist.get_world_size(), shard=1), "hybrid")
    torch.manual_seed(0)
    names |= {"mesh": mesh, "module": MyModel(), "rank": dist.get_rank(), "bare": MyModel()}
    # These two take the plain module; the other functions take the result of parallelize.
    if "broadcast_from" in used or "certify" in used:
        names["model"] = MyModel()
        names["state"] = MyModel().state_dict()
        return names
    names["model"] = parallelize(MyModel(), mesh, ParallelConfig("hybrid"))
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=0.1)
    names["bare_optimizer"] = torch.optim.AdamW(names["bare"].parameters(), lr=0.1)
    if "full_state" in used:
        for model, optimizer in (("model", "optimizer"), ("bare", "bare_optimizer")):
            names[model](x).sum().backward()
            names[optimizer].step()
            names[optimizer].zero_grad()
    return names


def run_block(folder: str, code: str) -> list[str]:
    """On a rank: runs the code in ``folder``; the names that it made."""
    os.chdir(folder)
    names = names_of(code)
    given = set(names)
    exec(compile(code, "block", "exec"), names)
    return sorted(set(names) - given)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text("words of a corpus\n" * 20_000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


ALONE = [block for block in blocks() if block[0] in ("data.md", "hooks.md") or "setup(" in block[1]]
ON_RANKS = [block for block in blocks() if block not in ALONE]


def test_snippets_were_found_and_every_skip_reason_is_needed():
    assert len(ALONE) + len(ON_RANKS) >= 10
    reasons = {
        _reason(page.name, code)
        for page in PAGES
        for language, code in BLOCK.findall(page.read_text())
        if language == "python"
    }
    assert set(ELSEWHERE) <= reasons


@pytest.mark.parametrize("block", ON_RANKS, ids=first_line)
def test_snippet_runs_on_ranks(ranks, folder, block):
    # This hook reads the full state, which other ranks do not have.
    is_of_rank0 = "full_state(model, optimizer)" in block[1]
    ranks.run(1 if is_of_rank0 else 2, run_block, str(folder), block[1])


@pytest.mark.parametrize("block", ALONE, ids=first_line)
def test_snippet_runs_in_one_process(folder, block):
    run_block(str(folder), block[1].replace('device="cuda"', 'device="cpu"'))
    assert not dist.is_initialized()


def test_the_hook_of_the_guide_stops_a_run():
    code = next(code for page, code in blocks() if page == "hooks.md")
    names: dict[str, Any] = {}
    exec(code, names)
    view = SimpleNamespace(model=nn.Linear(2, 2))
    assert names["Patrol"](every=10).step(view, 5, {}) is None
