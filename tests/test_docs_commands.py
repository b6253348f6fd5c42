"""The commands of README.md and docs/ that start no job run unchanged on an existing run and
corpus.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

import jobs
import pytest
from test_docs_words import PAGES, lines_of, words_of
from test_docs_words import is_elsewhere as is_composed_elsewhere

PROGRAM = re.compile(
    r"^\s*(?:\w+ +)?python -m parallel2d\.(checkpoint|data|report|launch|preflight) .*"
)
# In the place of words that the reader chooses
CHOSEN = {
    "RUN_DIR": "run",
    "RUN": "run",
    "DIR": "reported",
    "NEW_FOLDER": "exported-anew",
    "two/checkpoints/step-00000200": "run",
    "run/checkpoints/step-00000016": "run",
    "run/export": "exported-beside",
    "model.pt": "whole.pt",
    "~/.parallel2d-secret": "secret",
}
NEW = ("reported", "exported-anew", "exported", "exported-beside", "whole.pt", "secret")
# A word -> why a command with it does not run here
ELSEWHERE = {
    "--nnodes": "needs several nodes; test_preflight.py",
    "--self-check": "starts several runs; test_self_check.py",
    "TinyLlama-1.1B": "reads downloaded weights; test_checkpoint_convert.py",
    "ADAPTER": "needs a run with adapters; test_adapters.py",
}


def commands() -> dict[str, list[str]]:
    """Page and command -> its words after ``python -m``."""
    found = {}
    for page in PAGES:
        for line in lines_of(page):
            if PROGRAM.match(line):
                # Arguments in brackets may be omitted.
                text = re.sub(r"\[[^\]]*\]", "", line.strip())
                words = shlex.split(os.path.expandvars(text), comments=True)
                found[f"{page.name}: {' '.join(words)}"] = words
    return found


def is_elsewhere(words: list[str]) -> bool:
    return any(word in ELSEWHERE for word in words)


RUN_HERE = {name: words for name, words in commands().items() if not is_elsewhere(words)}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A finished run, a folder of runs, a corpus and its tokenizer, and the examples."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder: Path = tmp_path_factory.mktemp("commands")
    (folder / "corpus").mkdir()
    (folder / "examples").symlink_to(Path(__file__).parent.parent / "examples")
    (folder / "corpus" / "text.txt").write_text("words of a corpus, one after another\n" * 2_000)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train([str(folder / "corpus" / "text.txt")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    train = ["parallel2d.train", "train.steps=4", "checkpoint.every=2", "launch.nproc_per_node=2"]
    ran(folder, [*train, "hydra.run.dir=run"])
    shutil.copytree(folder / "run", folder / "outputs" / "first")
    return folder


def ran(folder: Path, words: list[str]) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}
    done = jobs.run_python("-m", *words, cwd=folder, env=environment, timeout=240)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_commands_were_found_and_every_skip_reason_is_needed():
    assert len(RUN_HERE) >= 12
    given = {word for words in commands().values() for word in words}
    assert set(ELSEWHERE) <= given


@pytest.mark.extras
def test_documented_commands_run(workspace):
    # In the order of the pages: some commands read the files of the previous command.
    for number, words in enumerate(RUN_HERE.values()):
        words = [CHOSEN.get(word, word) for word in words[words.index("-m") + 1 :]]
        for taken in NEW:
            if taken in words[2:]:
                words[words.index(taken, 2)] = f"{number}-{taken}"
        ran(workspace, words)
    assert (workspace / "tokens" / "manifest.json").exists()


# Requirements of a job that are missing here: data, weights, code or nodes of the reader.
NEEDED = ("path=", "target=", "model=hf", "rdzv_endpoint", "llama_8b", "my_hooks", "load=", "plan.")
SHORT = ["train.steps=3", "launch.nproc_per_node=4", "model.max_seq_len=128"]


def jobs_of_pages() -> dict[str, list[str]]:
    """Page and words -> words, of every job that needs nothing else."""
    found = {}
    for page in PAGES:
        for line in lines_of(page):
            words = words_of(line) if "parallel2d.train" in line else None
            if words is None or is_composed_elsewhere(words):
                continue
            if not any(need in word for word in words for need in NEEDED):
                found[f"{page.name}: {' '.join(words)}"] = words
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", jobs_of_pages())
def test_documented_job_trains(tmp_path, name):
    said = ran(tmp_path, ["parallel2d.train", *jobs_of_pages()[name], *SHORT])
    assert "loss" in said
