"""Wrong words end at once, with a non-zero code and one message that names the key, the value and what is allowed.

Most cases run the command's `main` in this process; that it shows nothing else is checked with a real process in
`test_command_line.py`.
"""

from __future__ import annotations

import os

import pytest

from parallel2d import launch
from parallel2d.train import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "taken").write_text("a file where a folder is wanted")

    def never(*_args):
        raise AssertionError("workers were started")

    monkeypatch.setattr(launch, "start_workers", never)


TEXT = (
    "data=text",
    "data.path=text.txt",
    "data.validation_fraction=0",
    "data.cache_dir=cache",
    "train.seq_len=16",
    "launch.nproc_per_node=4",
)

CASES = [
    (("trian.steps=5",), ["unknown key trian.steps", "train.steps"]),
    (("train.stepz=5",), ["unknown key train.stepz", "did you mean train.steps"]),
    (("steps=5",), ["unknown key steps", "did you mean train.steps or profile.steps?"]),
    (
        ("checkpoint.interval=5", "nothing.alike=1"),
        ["checkpoint.every, in steps", "unknown key nothing.alike (given as nothing.alike=1)"],
    ),
    (("--strategy", "fsdp"), ["--strategy is no option of this command", "such as strategy=VALUE"]),
    (("--job.config_file=x.toml",), ["job.config_file is an option of torchtitan"]),
    (("model.tensor_plan={a: colwise}",), ["model.tensor_plan", "model=custom or model=hf"]),
    (("model=custom", "model.path=x"), ["unknown key model.path", "it belongs to model=hf"]),
    (("model=hf", "model.dim=3"), ["it belongs to model=llama_8b and its other sizes"]),
    (("epochs=3",), ["epochs is an option of Keras: train.epochs"]),
    (("--logger=wandb",), ["metrics.tensorboard=true", "examples/wandb_hook.py"]),
    (("early_stopping=true",), ["train.stop.metric=METRIC, with train.stop.patience"]),
    (("--max_epochs", "3"), ["--max_epochs is no option of this command", ": train.epochs"]),
    (("+extra.key=5",), ["unknown key extra"]),
    (("+train.extra=5",), ["unknown key train.extra"]),
    (("strategy=hybird",), ["strategy=hybird", "ddp", "zero3", "did you mean hybrid"]),
    (("compile=true",), ["compile=true is not one of block, none"]),
    (
        ("precision=32", "optimizer=AdamW"),
        ["precision=32", "did you mean fp32", "optimizer=AdamW", "did you mean adamw"],
    ),
    (("optimizer=null",), ["optimizer=null is not one of"]),
    (("-m", "compile=true,none"), ["compile=true is not one of block, none"]),
    (("model=lama_debug",), ["model=lama_debug", "did you mean llama_debug"]),
    (("precision=fp8",), ["precision=fp8", "bf16", "fp32"]),
    (("precision.param=bf8",), ["precision.param=bf8", "fp64, fp32, bf16, fp16"]),
    (("bucketing=blocks",), ["bucketing=blocks", "did you mean block"]),
    (("train.steps=abc",), ["train.steps=abc", "whole number"]),
    (("train.steps=1.5",), ["train.steps=1.5", "whole number"]),
    (("train.steps=",), ["train.steps=", "whole number"]),
    (("train.steps=0",), ["train.steps=0", "at least 1"]),
    (("train.steps=-3", "optimizer.lr=-1"), ["train.steps=-3", "optimizer.lr=-1", "above 0"]),
    (("train.steps=[1,2",), ["train.steps=[1,2", "cannot be read"]),
    (("optimizer.lr=fast",), ["optimizer.lr=fast", "a number"]),
    (("optimizer.lr=inf",), ["optimizer.lr=inf must be finite"]),
    (("optimizer.betas=[0.9,inf]",), ["optimizer.betas=[0.9, inf] must be finite"]),
    ((f"train.seed={2**64}",), [f"train.seed={2**64}", "at most 9223372036854775807"]),
    (("model.n_layers=1000000000",), ["model.n_layers=1000000000", "at most 10000"]),
    (("hydra.run.dir=",), ["hydra.run.dir is empty"]),
    (("++hydra.run.dir=''",), ["hydra.run.dir is empty"]),
    (("train.steps=\x1b[31m",), ["train.steps=\\x1b[31m"]),
    (("train.deterministic=maybe",), ["train.deterministic=maybe", "true or false"]),
    (("mesh=3",), ["mesh=3", "mesh.replicate"]),
    (("mesh.replicate=two",), ["mesh.replicate=two", "auto"]),
    (("mesh.replicate=2.5",), ["mesh.replicate=2.5", "auto"]),
    (("~train.steps",), ["train.steps", "cannot be removed"]),
    (("model=custom",), ["model.target is required"]),
    (("model=custom", "model.target=foo"), ["model.target=foo", "package.module:name"]),
    (
        (*TEXT, "model=custom", "model.target=no.such:thing"),
        ["model.target=no.such:thing", "cannot be imported"],
    ),
    ((*TEXT, "model=custom", "model.target=os.path:nothing"), ["model.target", "has no nothing"]),
    (
        (*TEXT, "model=custom", "model.target=os:getcwd"),
        ["model.target=os:getcwd", "not an nn.Module"],
    ),
    (("model.n_heads=7",), ["model.dim=128", "model.n_heads=7", "model.n_kv_heads=4"]),
    (("data=text",), ["data.path"]),
    (("data=text", "data.path=nowhere.txt"), ["data.path=nowhere.txt"]),
    (("data=text", "data.path=empty.txt", "data.cache_dir=cache"), ["empty.txt"]),
    (("train.seq_len=4096",), ["train.seq_len=4096", "model.max_seq_len=2048"]),
    ((*TEXT, "model.vocab_size=100"), ["model.vocab_size=100", "257"]),
    ((*TEXT, "mesh.tensor=3"), ["mesh.tensor=3", "1, 2, 4"]),
    ((*TEXT, "mesh.shard=3"), ["mesh.shard=3", "1, 2, 4"]),
    (
        (*TEXT, "mesh.shard=2", "mesh.replicate=1"),
        ["mesh.replicate=1", "mesh.shard=2", "must be 4"],
    ),
    (
        (*TEXT, "strategy=zero3", "mesh.replicate=2"),
        ["strategy=zero3", "mesh.replicate=2", "hybrid"],
    ),
    ((*TEXT, "strategy=ddp", "mesh.shard=2"), ["strategy=ddp", "mesh.shard=2"]),
    ((*TEXT, "mesh.tensor=4", "train.seq_len=18"), ["train.seq_len=18", "mesh.tensor=4"]),
    ((*TEXT, "mesh.tensor=8", "launch.nproc_per_node=8"), ["mesh.tensor=8", "n_kv_heads=4"]),
    ((*TEXT, "train.global_batch_size=30"), ["train.global_batch_size=30", "4 data ranks"]),
    ((*TEXT, "train.micro_batch_size=3"), ["train.global_batch_size=32", "micro_batch_size 3"]),
    (("train.micro_batch_size=64",), ["train.micro_batch_size=64", "train.global_batch_size=32"]),
    (
        (*TEXT, "compile=block", "compile.backend=nonesuch"),
        ["compile.backend=nonesuch", "inductor"],
    ),
    ((*TEXT, "compile=block", "mesh.tensor=2"), ["compile=block", "mesh.tensor=2"]),
    (("activation_checkpointing.every=2",), ["activation_checkpointing.every"]),
    (("scheduler.warmup_steps=300",), ["scheduler.warmup_steps=300", "train.steps=300"]),
    (("optimizer.betas=[0.9]",), ["optimizer.betas=[0.9]"]),
    (("launch.nproc_per_node=0",), ["launch.nproc_per_node=0", "auto"]),
    (("metrics.console=loud",), ["metrics.console=loud", "rich, plain, silent"]),
    (("hydra.run.dir=taken",), ["run directory", "taken"]),
    (("hydra.run.dir=/proc/nowhere",), ["run directory", "/proc/nowhere"]),
    (("profile.steps=[3]",), ["profile.steps=[3] must be the first and the last step"]),
    (("train.steps=4", "profile.steps=[1,9]"), ["profile.steps=[1, 9]", "train.steps=4"]),
    (("profile.ranks=[-1]",), ["profile.ranks=[-1] must be ranks"]),
    (("-m", "strategy=ddp,zero4"), ["strategy=zero4", "did you mean zero3"]),
    (("-m", "train.steps=0,-1"), ["train.steps=0", "train.steps=-1"]),
    (("--experimental-rerun=job.pickle",), ["--experimental-rerun", "refused"]),
]


@pytest.mark.parametrize(
    ("words", "expected"), CASES, ids=[" ".join(words[-2:]) for words, _ in CASES]
)
def test_wrong_words_are_one_clear_message(words, expected, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("parallel2d: ")
    assert "Traceback" not in said
    assert all(word in said for word in expected), said


def test_all_problems_are_reported_at_once(capsys):
    main(["train.steps=0", "optimizer.lr=0", "scheduler.floor=2", "data=text"])
    said = capsys.readouterr().err
    assert all(
        key in said for key in ("train.steps", "optimizer.lr", "scheduler.floor", "data.path")
    )


@pytest.mark.parametrize(("environment", "expected"), [
    ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR and MASTER_PORT"]),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}, ["RANK=2", "WORLD_SIZE=2"]),
    ({"RANK": "zero", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}, ["RANK=zero"]),
])  # fmt: skip
def test_an_incomplete_rank_is_one_clear_message(environment, expected, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in expected)


SLURM_TASK = {
    "SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "77",
}  # fmt: skip


def test_an_srun_task_is_a_rank_and_a_shell_is_not():
    environment = dict(SLURM_TASK)
    found = launch.find_rank(environment)
    assert (found.rank, found.world_size, found.local_rank) == (5, 8, 1)
    assert (found.node, found.nodes, found.launcher) == (1, 2, "srun")
    assert environment["MASTER_ADDR"] == "gpu03"
    for shell in (
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"},
        {**SLURM_TASK, "SLURM_STEP_ID": str(0xFFFFFFFA)},
        {**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "1"},
    ):
        assert launch.find_rank(shell) is None


@pytest.mark.parametrize(("nodes", "first"), [
    ("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[03-05,9],cpu1", "gpu03"), ("a1,b[2-3]", "a1"), ("n[7]", "n7"),
])  # fmt: skip
def test_first_host_of_a_slurm_list(nodes, first):
    assert launch.first_host(nodes) == first


def test_nothing_is_left_behind_by_wrong_words(tmp_path):
    main(["strategy=hybird"])
    assert "outputs" not in os.listdir(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make links for somebody else")
@pytest.mark.parametrize(
    "place", ["train.log", ".hydra/config.yaml", "logs", "tensorboard/shard/events"]
)
def test_a_run_directory_with_a_planted_link_is_refused(tmp_path, capsys, place):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    os.lchown(link, 65534, 65534)
    assert main([*TEXT, f"hydra.run.dir={tmp_path}/run"]) == 2
    assert f"hydra.run.dir: {link}: a link that another user has made" in capsys.readouterr().err
    assert outside.read_text() == "mine"
