"""``python -m parallel2d.plan``: the fastest layout that fits, with a reason for each other one."""

import functools
import json
import shlex

import pytest

from parallel2d import ConfigError, plan, train
from parallel2d.base.config.composition import compose
from parallel2d.instruments.planner.layout_cost import cost_of
from parallel2d.instruments.planner.layout_search import (
    SearchResult,
    command_line,
    fixed_keys,
    search,
)
from parallel2d.instruments.planner.plan_text import ranking_lines

# Two nodes of four ranks. Activations are most of the memory of a rank.
JOB = (
    "model.dim=128",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.n_kv_heads=4",
    "model.hidden_dim=256",
    "train.seq_len=128",
    "train.global_batch_size=32",
    "precision=bf16",
    "cluster=h100_100g",
    "cluster.nodes=2",
    "cluster.ranks_per_node=4",
    "mesh.tensor=1",
)
UNTRACED = "plan.verify=false"


@functools.cache
def found(*words: str) -> SearchResult:
    return search(compose([*JOB, *words]).config, fixed_keys([*JOB, *words]))


@pytest.mark.slow
def test_search_chooses_the_fastest_layout_that_fits():
    result = found(UNTRACED)
    seconds = [layout.time.seconds.total for layout in result.ranked]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-5)
    assert result.chosen is result.ranked[0]
    assert all(layout.reason for layout in result.ranked[1:])
    # The arithmetic of a search equals the arithmetic of each single layout.
    for layout in result.ranked[::40]:
        alone = cost_of(layout.config)
        assert alone.time.seconds.total == pytest.approx(layout.time.seconds.total)
        assert alone.states == layout.cost.states
    lines = ranking_lines(result)
    assert sum(line.endswith(" chosen") for line in lines) == 1
    assert any("times as long" in line for line in lines)
    assert lines[-1].endswith("more")


def test_every_strategy_and_mesh_is_tried():
    result = found(UNTRACED)
    tried = {layout.words[:3] for layout in result.ranked}
    assert ("strategy=ddp", "mesh.replicate=8", "mesh.shard=1") in tried
    assert ("strategy=zero3", "mesh.replicate=1", "mesh.shard=8") in tried
    for name in ("hybrid", "hybrid_zero2", "hybrid_full"):
        assert (f"strategy={name}", "mesh.replicate=2", "mesh.shard=4") in tried
        assert (f"strategy={name}", "mesh.replicate=4", "mesh.shard=2") in tried
    assert {layout.words[4] for layout in result.ranked} == {
        f"activation_checkpointing={name}" for name in ("none", "selective", "full")
    }
    assert {layout.words[5] for layout in result.ranked} == {
        f"train.micro_batch_size={size}" for size in (1, 2, 4)
    }


def test_search_keeps_given_keys():
    words = [
        "strategy=hybrid",
        "mesh.shard=2",
        "train.micro_batch_size=2",
        "activation_checkpointing=full",
    ]
    result = found(UNTRACED, *words, "activation_checkpointing.every=2")
    (layout,) = result.ranked
    given = (words[0], "mesh.replicate=4", words[1], "mesh.tensor=1", words[3], words[2])
    assert layout.words == given
    assert layout.config.activation_checkpointing.every == 2
    named = found(UNTRACED, "strategy.name=zero2")
    assert {layout.words[0] for layout in named.ranked} == {"strategy=zero2"}
    assert "one replica:" not in ranking_lines(named)[-1], "the user has chosen it"


def test_ranking_gives_the_reasons_of_a_small_batch_and_of_flat_sharding():
    small = ranking_lines(found(UNTRACED, "train.global_batch_size=4", "mesh.tensor=2"))
    assert (
        small[-1].strip().startswith("train.global_batch_size=4 is less than one sample per rank")
    )
    fast = [f"cluster.between_nodes.{way}_gbit=28800" for way in ("up", "down")]
    sizes = ("model.dim=2048", "model.hidden_dim=8192", "train.seq_len=2048")
    lines = ranking_lines(found(UNTRACED, "activation_checkpointing=none", *sizes, *fast))
    assert lines[-1].strip().startswith("one replica: the network is fast enough")


def test_chosen_layout_was_traced_and_faster_layouts_do_not_fit():
    fastest = search_traced(100)
    limit = fastest.chosen.cost.traced / 2**30 * 0.9
    result = search_traced(limit)
    place = result.ranked.index(result.chosen)
    assert place > 0
    assert result.chosen.cost.traced <= limit * 2**30
    assert all(layout.reason.startswith("does not fit: ") for layout in result.ranked[:place])
    assert len(result.ranked) == len(fastest.ranked)
    assert ranking_lines(result)[3].endswith(" chosen"), "layouts that do not fit come last"


def search_traced(memory_gib: float) -> SearchResult:
    words = ("strategy=hybrid", "mesh.shard=4", "bucketing=block", "plan.verify=true")
    return found(f"cluster.device.memory_gib={memory_gib}", *words)


@pytest.mark.parametrize(
    ("word", "begin", "end"),
    [
        ("cluster.device.memory_gib=0.00001", "no layout fits: the smallest of", "take more nodes"),
        (
            "train.global_batch_size=7",
            "no layout can run; the first one: train.global_batch_size=7 is not divisible",
            "",
        ),
        (
            "precision.float8=tensorwise",
            "layouts cannot be ranked: compute in 8-bit floats",
            "plans the one that is given",
        ),
    ],
)
def test_invalid_search_gives_one_sentence(word, begin, end):
    with pytest.raises(ConfigError) as caught:
        found(UNTRACED, word)
    assert str(caught.value).startswith(begin)
    assert str(caught.value).endswith(end)


@pytest.mark.slow
def test_printed_command_reproduces_the_plan(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan.main([*JOB, UNTRACED, "plan.json=plan.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (command,) = [line.removeprefix("command     ") for line in lines if line.startswith("command")]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "parallel2d.train"]
    assert train.main([*words[3:], UNTRACED, "plan.dry_run=true"]) == 0
    dry = capsys.readouterr().out.splitlines()
    assert dry == lines[lines.index(dry[0]) : -1]
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["command"] == command
    chosen = [layout for layout in written["layouts"] if layout["reason"] is None]
    assert [layout["words"] for layout in chosen] == [words[-len(chosen[0]["words"]) :]]
    assert plan.main([*JOB, UNTRACED, "plan.json=plan.json"]) == 2
    assert "plan.json=plan.json cannot be written: File exists" in capsys.readouterr().err


def test_printed_command_keeps_and_quotes_given_overrides():
    chosen = found(UNTRACED).chosen
    given = [
        "model=custom",
        "data.path=two words",
        "strategy=ddp",
        "mesh.tensor=1",
        "plan.verify=false",
    ]
    line = command_line(given, chosen)
    assert "model=custom 'data.path=two words' strategy=" in line
    assert line.count("strategy=") == 1
    assert "plan." not in line
