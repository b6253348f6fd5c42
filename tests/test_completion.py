"""Completion with TAB, in real shells: what is installed is sourced, and its function is asked."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel2d.config.completion import candidates

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ["auto", "ddp", "hybrid", "hybrid_full", "hybrid_zero2", "zero2", "zero3"]
MODELS = [
    "custom",
    "hf",
    "llama_15m",
    "llama_160m",
    "llama_1b",
    "llama_405b",
    "llama_70b",
    "llama_8b",
    "llama_debug",
]

WORDS = [
    (["str"], ["strategy.", "strategy="]),
    (["strategy="], [f"strategy={name}" for name in STRATEGIES]),
    (["+strategy=hybrid_"], ["+strategy=hybrid_full", "+strategy=hybrid_zero2"]),
    (["-m", "strategy=ddp,zero"], ["strategy=ddp,zero2", "strategy=ddp,zero3"]),
    (["model="], [f"model={name}" for name in MODELS]),
    (["sch"], ["scheduler.", "scheduler="]),
    (["train.st"], ["train.steps=", "train.stop."]),
    (["train.stop.mode="], ["train.stop.mode=max", "train.stop.mode=min"]),
    (["train.steps="], ["train.steps=300"]),
    (["train.determ"], ["train.deterministic="]),
    (["train.deterministic="], ["train.deterministic=false", "train.deterministic=true"]),
    (["data.packing="], ["data.packing=packed", "data.packing=padded"]),
    (["mesh.shard="], ["mesh.shard=auto"]),
    (["train.steps=4", "cpu_o"], ["cpu_offload="]),
    (["model.he"], []),
    (["model=hf", "model.he"], ["model.head="]),
    (["model=hf", "model.head=ba"], ["model.head=base"]),
    (["model=hff", "train.stepz=3", "train.see"], ["train.seed="]),  # in spite of wrong words
    (["--cfg", ""], ["all", "hydra", "job"]),
    (["--conf"], ["--config-dir", "--config-name"]),
    (["-sc", "install=f"], ["install=fish"]),
    (["hydra.run."], ["hydra.run.dir="]),
    (["train.steps.more"], []),
]


@pytest.mark.parametrize(("words", "expected"), WORDS, ids=[" ".join(words) for words, _ in WORDS])
def test_what_may_stand_in_the_place_of_the_last_word(words, expected):
    assert candidates(words) == expected


def test_the_first_word_may_be_any_group_or_key():
    found = candidates([""])
    assert {"strategy=", "strategy.", "experiment=", "train.", "mesh.", "cpu_offload="} <= set(
        found
    )
    assert not [word for word in found if "schema" in word]


def test_choices_of_a_folder_of_ones_own(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "big.yaml").write_text("# @package _global_\n")
    expected = ["experiment=big", "experiment=none"]
    assert candidates([f"--config-dir={tmp_path}", "experiment="]) == expected
    assert candidates(["--config-dir", str(tmp_path), "experiment="]) == expected


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a shell that finds ``parallel2d`` and ``python``."""
    folder = tmp_path_factory.mktemp("bin")
    start = "import sys; from parallel2d.__main__ import main; sys.exit(main())"
    programs = {"parallel2d": ["-c", start], "python": [], "python3": []}
    for name, words in programs.items():
        line = f'exec {shlex.join([sys.executable, *words])} "$@"'
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TERM": "dumb"}


# A line, its words as bash has them, and what it offers.
LINES = [
    ("parallel2d tr", ["parallel2d", "tr"], ["train"]),
    ("parallel2d train str", ["parallel2d", "train", "str"], ["strategy.", "strategy="]),
    ("parallel2d train strategy=", ["parallel2d", "train", "strategy", "="], STRATEGIES),
    (
        "parallel2d train strategy=zero",
        ["parallel2d", "train", "strategy", "=", "zero"],
        ["zero2", "zero3"],
    ),
    (  # with = taken out of COMP_WORDBREAKS
        "parallel2d train strategy=zero",
        ["parallel2d", "train", "strategy=zero"],
        ["strategy=zero2", "strategy=zero3"],
    ),
    ("parallel2d train model=", ["parallel2d", "train", "model", "="], MODELS),
    ("parallel2d certify train.see", ["parallel2d", "certify", "train.see"], ["train.seed="]),
    ("parallel2d data ", ["parallel2d", "data", ""], ["prepare", "inspect", "verify"]),
    ("parallel2d report runs", ["parallel2d", "report", "runs"], []),
    (
        "python -m parallel2d.train strategy=zero",
        ["python", "-m", "parallel2d.train", "strategy", "=", "zero"],
        ["zero2", "zero3"],
    ),
    (
        "python3 -m parallel2d train strategy=dd",
        ["python3", "-m", "parallel2d", "train", "strategy", "=", "dd"],
        ["ddp"],
    ),
    ("python -m parallel2d.ch", ["python", "-m", "parallel2d.ch"], ["parallel2d.checkpoint"]),
    ("python -m parallel2d chec", ["python", "-m", "parallel2d", "chec"], ["checkpoint"]),
    ("python other.py s", ["python", "other.py", "s"], ["as", "before"]),
]
SETUP = """
other() { COMPREPLY=(as before); }
complete -o default -F other python
eval "$(parallel2d train -sc install=bash)"
eval "$(python -m parallel2d.train -sc install=bash)"
eval "$(python -m parallel2d.train -sc install=bash)"  # a second time
complete_line() {
    COMP_LINE=$1 COMP_POINT=${#1}
    shift
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    $(complete -p "$1" | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
    echo "${COMPREPLY[*]}"
}
"""


@pytest.fixture(scope="module")
def offered(environment):
    """What bash offers for each of `LINES`."""
    calls = [shlex.join(["complete_line", line, *words]) for line, words, _ in LINES]
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join([SETUP, *calls])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("number", range(len(LINES)), ids=[line for line, _, _ in LINES])
def test_bash_offers(offered, number):
    assert offered[number].split() == LINES[number][2]


def test_the_middle_of_a_line_is_completed_too(environment):
    line = "parallel2d train strat precision=bf16"
    call = (
        f"COMP_LINE='{line}' COMP_POINT=22 COMP_CWORD=2 "
        "COMP_WORDS=(parallel2d train strat precision = bf16); _parallel2d; echo ${COMPREPLY[*]}"
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f'eval "$(parallel2d -sc install=bash)"; {call}'],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["strategy.", "strategy="]


@pytest.mark.slow
def test_tab_in_an_interactive_bash(environment):
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    try:
        install = 'eval "$(parallel2d train -sc install=bash)"; echo rea""dy\r'
        assert typed(terminal, install, until="ready")
        # A space follows what is complete, and nothing what goes on.
        assert typed(terminal, "parallel2d train strategy=hybrid_z\t", until="hybrid_zero2 ")
        assert typed(terminal, "train.determin\tt\t", until="train.deterministic=true ")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def typed(terminal, keys, until, seconds=60.0):
    """Whether the terminal shows ``until`` after ``keys``."""
    os.write(terminal, keys.encode())
    shown, end = "", time.monotonic() + seconds
    while until not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return until in shown


def test_what_was_installed_is_removed(environment):
    script = (
        'eval "$(parallel2d train -sc install=bash)"; complete -p parallel2d; '
        'eval "$(parallel2d train -sc uninstall=bash)"; complete -p parallel2d'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "-F _parallel2d parallel2d" in done.stdout
    assert "no completion specification" in done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_offers(environment, tmp_path):
    (tmp_path / "corpus.txt").write_text("")
    script = """
    parallel2d train -sc install=fish | source
    python -m parallel2d.train -sc install=fish | source
    for line in "parallel2d tr" "parallel2d train strategy=zero" "parallel2d train data.path=cor" \\
            "python -m parallel2d.train strategy=dd"
        echo (complete -C $line)
    end
    """
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "train",
        "strategy=zero2 strategy=zero3",
        "data.path=corpus.txt",
        "strategy=ddp",
    ]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_tab_in_an_interactive_zsh(environment):
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
    try:
        install = (
            "autoload -Uz compinit; compinit -u -D; "
            'eval "$(parallel2d train -sc install=zsh)"; echo rea""dy\r'
        )
        assert typed(terminal, install, until="ready")
        assert typed(terminal, "parallel2d train strategy=hybrid_z\t", until="hybrid_zero2")
        assert typed(terminal, "train.determin\t", until="train.deterministic=")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
