"""Groups of the configuration: custom experiments, and the choices of a group."""

import re
from pathlib import Path

import pytest

from parallel2d import ConfigError
from parallel2d.base.config.composition import compose
from parallel2d.base.config.sweep import run_sweep

MODELS = "custom, hf, llama_15m, llama_160m, llama_1b, llama_405b, llama_70b, llama_8b, llama_debug"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder for --config-dir with two experiments and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "model").mkdir()
    for name, steps in (("big", 7), ("small", 3)):
        text = f"# @package _global_\ntrain:\n  steps: {steps}\n"
        (tmp_path / "own" / "experiment" / f"{name}.yaml").write_text(text)
    (tmp_path / "own" / "model" / "narrow.yaml").write_text(
        "defaults: [llama_debug, _self_]\ndim: 64\n"
    )
    return "--config-dir=own"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_an_experiment_is_chosen_with_and_without_plus(own, plus):
    assert compose([own, f"{plus}experiment=big"]).config.train.steps == 7
    assert compose([own, f"{plus}experiment=big", "train.steps=8"]).config.train.steps == 8


@pytest.mark.slow
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_experiments_are_swept_with_and_without_plus(own, plus):
    jobs = []
    run_sweep(["-m", own, f"{plus}experiment=big,small"], jobs.append)
    assert [job.config.train.steps for job in jobs] == [7, 3]
    # The overrides of a job mean the same in a separate command.
    for job in jobs:
        assert compose(job.overrides).config.train.steps == job.config.train.steps


def test_sweep_jobs_that_share_a_run_directory_are_refused(own):
    jobs = []
    words = ["-m", own, "optimizer.lr=1,2", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=same"]
    with pytest.raises(ConfigError, match="jobs 0 and 1 of the sweep have the same run directory"):
        run_sweep(words, jobs.append)
    assert [job.config.optimizer.lr for job in jobs] == [1.0]


def test_custom_model_config_extends_a_shipped_model(own):
    assert compose([own, "model=narrow"]).config.model.dim == 64


@pytest.mark.parametrize("name", ["llama_schema", "schema", "train_schema"])
def test_schema_is_not_a_choice(name):
    with pytest.raises(ConfigError, match=f"model={name} is not one of {MODELS}(;|$)"):
        compose([f"model={name}"])


@pytest.mark.parametrize("word", ["schema=llama", "+schema=llama"])
def test_schema_group_is_not_selectable(word):
    with pytest.raises(ConfigError, match="unknown key schema"):
        compose([word])


def test_group_added_twice_gives_one_message():
    with pytest.raises(ConfigError, match="Multiple values for strategy"):
        compose(["+strategy=ddp"])


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "experiment=bog",
            "no experiment 'bog'; there are big, small; pass --config-dir DIR with experiment/bog.yaml",
        ),
        ("model=narow", "model=narow is not one of .*; did you mean narrow"),
        ("train.stepz=3", "unknown key train.stepz .*did you mean train.steps"),
    ],
)
def test_wrong_override_is_explained_with_custom_config_files(own, word, told):
    with pytest.raises(ConfigError, match=told):
        compose([own, word])


def test_custom_config_file_extends_the_shipped_config(own, tmp_path):
    text = "defaults: [train, _self_]\ntrain:\n  steps: 5\n"
    (tmp_path / "own" / "mine.yaml").write_text(text)
    config = compose([own, "--config-name=mine", "experiment=none", "model=narrow"]).config
    assert (config.train.steps, config.model.dim) == (5, 64)
    with pytest.raises(ConfigError, match="train.stepz"):
        compose([own, "--config-name=mine", "train.stepz=3"])
    with pytest.raises(ConfigError, match="Cannot find primary config 'other'"):
        compose([own, "--config-name=other"])


def test_missing_config_dir_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--config-dir=.*/none is not a folder"):
        compose([f"--config-dir={tmp_path}/none"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{G}optimzer:\n  lr: 1\n", "unknown key optimzer.lr; did you mean optimizer.lr?"),
        ("{G}train:\n  stepz: 1\n", "unknown key train.stepz; did you mean train.steps?"),
        ("optimizer:\n  lr: 1\n", "it must begin with the line # @package _global_"),
        (
            "{G}defaults:\n  - override /optimiser: sgd\n",
            "there is no group optimiser; did you mean optimizer?",
        ),
        (
            "{G}defaults:\n  - override /optimizer: sdg\n",
            "optimizer=sdg is not one of adam, .*; did you mean sgd?",
        ),
        ("{G}optimizer:\n  lr: fast\n", "optimizer.lr=fast must be a number, above 0"),
        ("{G}optimizer:\n  lr: [1\n", "faulty.yaml:4:1: expected ',' or ']'"),
        (
            "{G}optimizer:\n lr: 1\n  clip_norm: 3\n",
            "faulty.yaml:4:12: mapping values are not allowed here",
        ),
    ],
)
def test_error_in_an_experiment_names_its_file(own, text, message):
    file = Path("own/experiment/faulty.yaml")
    file.write_text(text.replace("{G}", "# @package _global_\n"))
    with pytest.raises(ConfigError, match="faulty.yaml:") as caught:
        compose([own, "experiment=faulty"])
    assert "\n" not in str(caught.value)
    assert re.search(message.replace("?", r"\?").replace("[", r"\["), str(caught.value))


def test_messages_of_hydra_keep_their_advice():
    with pytest.raises(ConfigError, match="To sweep over it, add --multirun"):
        compose(["optimizer.lr=1,2"])
    with pytest.raises(ConfigError, match="a plugin needs pip install hydra-nevergrad-sweeper"):
        run_sweep(["-m", "hydra/sweeper=nevergrad"], lambda job: None)
    assert compose(["train.steps=1e3"]).config.train.steps == 1000
