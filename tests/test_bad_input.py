"""Wrong overrides end at once, with a non-zero code and one message that names the key, the value
and the allowed values.
"""

import os
import re
import resource
import sys
from dataclasses import fields, is_dataclass

import jobs
import pytest

from parallel2d import ConfigError
from parallel2d.base.config import TrainConfig
from parallel2d.base.config.options import default_of, field_problems, load_reference, value_problem
from parallel2d.base.launcher_environment import find_rank, first_host
from parallel2d.train import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "taken").write_text("a file where a folder is wanted")

    def never(*_args):
        raise AssertionError("workers were started")

    monkeypatch.setattr("parallel2d.train.start_workers", never)


TEXT = (
    "data=text",
    "data.path=text.txt",
    "data.validation_fraction=0",
    "data.cache_dir=cache",
    "train.seq_len=16",
    "launch.nproc_per_node=4",
)

# Overrides that are refused together; each override has a separate message.
CASES = [
    (
        ("trian.steps=5", "train.stepz=5", "steps=5", "nothing.alike=1", "model.path=x",
         "early_stopping=true"),
        ["unknown key trian.steps", "did you mean train.steps?",
         "did you mean checks.steps or train.steps or profile.steps?",
         "unknown key nothing.alike (given as nothing.alike=1)", "unknown key early_stopping",
         "models of family hf have it"],
    ),
    (("--strategy", "fsdp"), ["--strategy is not an option of this command", "such as strategy=VALUE"]),
    (("experiment=big",), ["no experiment 'big'; pass --config-dir DIR"]),
    (("model=custom", "model.dim=3"), ["models of family llama have it"]),
    (("+extra.key=5",), ["unknown key extra"]),
    (("+train.extra=5", "train.zzzz=1"), ["unknown key train.extra", "--help train lists keys"]),
    (
        ("strategy=hybird", "compile=true", "precision=32", "optimizer=AdamW", "model=lama_debug",
         "bucketing=blocks"),
        ["strategy=hybird", "did you mean hybrid", "compile=true is not one of auto, block, none",
         "precision=32", "did you mean fp32",
         "did you mean adamw", "did you mean llama_debug", "did you mean block"],
    ),
    (("-m", "compile=true,none", "train.stepz=1,2"),
        ["compile=true is not one of auto, block, none", "did you mean train.steps?"]),
    (
        ("train.steps=abc", "train.seq_len=1.5", "optimizer.lr=fast", "train.deterministic=maybe", "mesh=3",
         "mesh.shard=2.5", "~train.seed", "train.epochs=[1,2", "train.gc_every="),
        ["train.steps=abc must be a whole number", "train.seq_len=1.5",
         "optimizer.lr=fast must be a number", "true or false", "mesh=3",
         "set one of mesh.replicate", "mesh.shard=2.5", "cannot be removed",
         "train.epochs=[1,2 cannot be read", "train.gc_every= must be a whole number"],
    ),
    (
        ("train.steps=-3", "optimizer.lr=inf", "optimizer.betas=[0.9,inf]", f"train.seed={2**64}",
         "model.n_layers=1000000000",
         "precision.param=bf8", "metrics.console=loud", "launch.nproc_per_node=0", "sync.wire=sparse",
         "precision.output=fp8",
         "train.epochs=0", "scheduler.floor=2", "mesh.replicate=two", "train.stop.metric=validation/lose"),
        ["train.steps=-3 must be a whole number, at least 1", "optimizer.lr=inf must be finite",
         "optimizer.betas=[0.9, inf] must be two numbers",
         f"train.seed={2**64}", "at most 9223372036854775807", "model.n_layers=1000000000", "at most 10000",
         "fp64, fp32, bf16, fp16",
         "rich, plain, silent", "a whole number, at least 1, or auto", "sync.wire=sparse is not one of",
         "bf16, fp16, or null",
         "train.epochs=0 must be a whole number or null, at least 1", "scheduler.floor=2.0",
         "mesh.replicate=two must be a whole number, at least 1, or auto", "did you mean validation/loss"],
    ),
    (("hydra.run.dir=",), ["hydra.run.dir is empty"]),
    (("train.steps=\x1b[31m",), ["train.steps=\\x1b[31m"]),
    (("model=custom",), ["model.target is required"]),
    (("data=custom",), ["data.target is required"]),
    (("optimizer=custom",), ["optimizer.target is required"]),
    (("model=custom", "model.target=foo", "model.init=a.b"),
        ["model.target=foo", "package.module:name", "model.init=a.b"]),
    ((*TEXT, "model=custom", "model.target=no.such:thing"),
        ["model.target=no.such:thing", "cannot be imported"]),
    ((*TEXT, "model=custom", "model.target=os.path:nothing"), ["model.target", "no attribute 'nothing'"]),
    ((*TEXT, "model=custom", "model.target=os:getcwd"), ["model.target=os:getcwd", "not an nn.Module"]),
    (
        ("model.n_heads=7", "data=text", "train.seq_len=4096", "train.micro_batch_size=64",
         "scheduler.warmup_steps=300",
         "profile.steps=[1,999]", "profile.ranks=[-1]", "optimizer.nesterov=true",
         "activation_checkpointing.every=2", "sync.warmup=5",
         "optimizer.groups=[{pattern: a}]", "launch.nnodes=0", "bucketing.size_mib=3", "plan.dry_run=true",
         "plan.scaling=weak",
         "checkpoint.keep_best_mode=max", "train.hooks=[a]", "cluster.inside_node.up_gbit=1"),
        ["model.dim=128", "model.n_heads=7", "model.n_kv_heads=4", "data.path is required",
         "model.max_seq_len=2048",
         "train.global_batch_size=32", "scheduler.warmup_steps=300 must be below train.steps=300",
         "profile.steps=[1, 999]",
         "profile.ranks=[-1] must be ranks",
         "optimizer.nesterov=true has no effect with optimizer=adamw, only with sgd, muon",
         "activation_checkpointing.every=2 has no effect with activation_checkpointing=none",
         "sync.warmup=5 has no effect with sync.wire=auto, only with int4",
         "optimizer.groups has", "launch.nnodes=0",
         "bucketing.size_mib=3.0 has no effect with bucketing=block, only with size",
         "plan.scaling=weak does not go with plan.dry_run=true", "has no effect without checkpoint.keep_best",
         "train.hooks has a; ", "up_gbit=1.0 has no effect without cluster.inside_node.down_gbit"],
    ),
    (("data=text", "data.path=nowhere.txt"), ["data.path=nowhere.txt"]),
    (("data=text", "data.path=empty.txt", "data.cache_dir=cache"), ["empty.txt"]),
    ((*TEXT, "model.vocab_size=100"), ["model.vocab_size=100", "257"]),
    ((*TEXT, "mesh.tensor=3"), ["mesh.tensor=3", "1, 2 or 4"]),
    ((*TEXT, "strategy=ddp", "mesh.shard=2"), ["strategy=ddp", "mesh.shard=2"]),
    ((*TEXT, "mesh.tensor=4", "train.seq_len=18"), ["train.seq_len=18", "mesh.tensor=4"]),
    ((*TEXT, "mesh.tensor=8", "launch.nproc_per_node=8"), ["mesh.tensor=8", "n_kv_heads=4"]),
    ((*TEXT, "train.global_batch_size=30"), ["train.global_batch_size=30", "4 data ranks"]),
    ((*TEXT, "train.micro_batch_size=3"), ["train.global_batch_size=32", "micro_batch_size 3"]),
    ((*TEXT, "compile=block", "compile.backend=nonesuch"), ["compile.backend=nonesuch", "inductor"]),
    ((*TEXT, "fsdp.symmetric_memory=true"), ["fsdp.symmetric_memory=true needs GPUs"]),
    (("hydra.run.dir=taken",), ["run directory", "taken"]),
    (("cluster=h1000",), ["did you mean h100?"]),
    (("cluster=h100", "cluster.inside_node.latency_us=-2"),
        ["latency_us=-2.0 must be a number or null, at least 0"]),
    (("cluster=h100", "cluster.inside_node.latency_us=inf"), ["latency_us=inf must be finite"]),
    (("-m", "strategy=ddp,zero4"), ["strategy=zero4", "did you mean zero3"]),
    (("-m", "train.steps=0,-1"), ["train.steps=0", "train.steps=-1"]),
    (("--experimental-rerun=job.pickle",), ["--experimental-rerun", "refused"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"), CASES, ids=[" ".join(words[-2:]) for words, _ in CASES]
)
def test_wrong_overrides_give_one_clear_message(words, expected, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("parallel2d: ")
    assert "Traceback" not in said
    assert all(word in said for word in expected), said


@pytest.mark.parametrize(("words", "told"), [
    (("train.epochs=2", "data.epochs=3"), "contradict each other"),
    (("strategy=hybrid_full", "sync=diloco"), "hybrid_full does not go with sync=diloco"),
    (("sync.wire=int4", "sync.during_accumulation=full"), "is sent once in a global batch"),
    (("sync=diloco", "sync.every=4", "sync.delay=4"), "must be below sync.every=4"),
    (("sync=diloco", "sync.every=4", "sync.fragments=5"), "at most sync.every=4"),
    (("train.stop.metric=accuracy",), "train.stop.metric=accuracy is never measured"),
    (("checkpoint.keep_best=validation/loss", "train.validate_every=0"),
        "is never measured in this job: it may be loss, grad_norm, or a metric"),
    (("checkpoint.keep_best=validation/loss", "train.validate_every=1", "data.validation_fraction=0"),
        "it may be loss, grad_norm, or a metric"),
    (("train.hooks=[{every: 5}]",), "an entry has the form package.module:Class"),
    (("optimizer.groups=[{weight_decay:0.1}]",), "an entry has the form"),
    (("optimizer.groups=[{pattern:a,weigth_decay:0.1}]",), "did you mean weight_decay?"),
    (("model=custom", "model.target=a:B", "train.loss=a:b", "train.loss_chunk=8"),
        "does not go with train.loss=a:b: it chunks the head"),
    (("model=hf", "model.adapter={r: 4}", "model.path=base", "mesh.tensor=2"),
        "mesh.tensor=2: model.adapter needs mesh.tensor=1"),
    (("model=hf", "model.adapter={r: 4}", "model.architecture=llama"), "model.adapter needs model.path"),
    (("precision=bf16", "precision.keep_low_precision_gradients=true"),
        "has no effect with precision.reduce=fp32"),
    (("launch.rdzv_endpoint=a:1",), "has no effect with launch.nnodes=1"),
    (("launch.nnodes=2",), "needs launch.rdzv_endpoint"),
    (("launch.min_replicas=2", "strategy=hybrid_full"), "launch.min_replicas=2 has no effect here"),
    (("launch.first_step_timeout=1",), "must be at least launch.timeout"),
    (("launch.heartbeat_timeout_s=0.9",), "must be at least twice launch.heartbeat_interval_s=0.5"),
    (("model.n_heads=128", "model.n_kv_heads=1"), "= 1 must be even"),
    (("model=hf", "model.path=a", "model.architecture=b"), "model=hf needs either"),
    (("model=hf", "model.path=a", "data.intra_document_masking=true"), "take no document ids"),
    (("model=hf", "model.path=a", "model.adapter=[r]"), "must be arguments of peft.LoraConfig"),
    (
        ("model=hf", "model.path=a", "model.adapter={use_dora: true}", "bucketing=layer"),
        "bucketing=layer: use_dora of model.adapter needs bucketing=block",
    ),
    (("model=custom", "model.target=a:b", "model.tensor_plan={a: colwize}"), "did you mean colwise"),
    (("model=custom", "model.target=a:b", "model.tensor_plan=a"), "or have the form package.module:function"),
    (("optimizer=sgd", "optimizer.implementation=fused"), "use foreach or loop"),
    (("optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"),
        "needs optimizer.momentum above 0"),
    (("precision=bf16_reduce_bf16", "precision.keep_low_precision_gradients=true"),
        "is for optimizers of your own"),
    (("bucketing.blocks=[A]", "bucketing.policy=a:b"),
        "bucketing.policy=a:b does not go with bucketing.blocks=[A]: both choose"),
    (("checkpoint.keep_best=validation/wiki/loss",), "never measured"),
    (("checkpoint.keep_best=loss", "checkpoint.enabled=false"),
        "does not go with checkpoint.enabled=false: nothing is saved"),
    (("train.stop.patience=2",), "no effect without train.stop.metric"),
    (("train.stop.metric=loss", "train.stop.mode=low"), "train.stop.mode=low is not one of min, max"),
    (("train.hooks=[7]",), "an entry has the form package.module:Class"),
    (("model=custom", "model.target=a:B", "train.loss=a:b", "train.z_loss=0.1"),
        "train.z_loss=0.1 does not go with train.loss=a:b: it is added to the cross-entropy"),
    (("model=hf", "model.adapter={r: 4}", "model.path=base", "model.load_weights=false"),
        "and model.load_weights=true"),
    (("precision=fp32", "precision.fp32_modules=[LayerNorm]"), "only with bf16, fp16"),
    (("train.epochs=2", "train.steps=5"), "both say when"),
    (("sync=diloco", "sync.during_accumulation=full"),
        "sync.during_accumulation=full does not go with sync=diloco"),
    (("data=custom", "data.target=a:b", "train.seq_len=3"), "the data set decides it"),
    (("precision=bf16", "precision.output=bf16", "train.loss_chunk=3"), "would round"),
    (("train.stop.metric=loss", "train.stop.patience=0"),
        "train.stop.patience=0 must be a whole number, at least 1"),
    (("model.n_heads=0",), "model.n_heads=0 must be a whole number, at least 1"),
    (("optimizer.betas=[0.9]",), "optimizer.betas=[0.9] must be two numbers"),
    (("cluster.nodes=0",), "cluster.nodes=0 must be a whole number, at least 1"),
    (("data=tokens",), "data=tokens needs either"),
    (("data=tokens", "data.mixture=[3]"), "an entry has the form {path"),
    (("optimizer.groups=[{pattern: a, lr: 3}]",), "lr is not one of pattern"),
    (("optimizer.groups=[{pattern: a, algorithm: muon}]",), "with optimizer=adamw, only with muon"),
    (("optimizer=muon", "optimizer.groups=[{pattern: a, algorithm: lion}]"),
        "algorithm=lion is not one of muon, adamw"),
    (("optimizer.groups=[{pattern: a, lr_scale: -1}]",), "lr_scale=-1 must be a number, at least 0"),
])  # fmt: skip
def test_contradictions_are_refused(words, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        jobs.config_of(words)


def conditional_fields():
    """Section, field and its readers, for each field that has an effect only with some choices."""
    for section in vars(TrainConfig()).values():
        if is_dataclass(section):
            for item in fields(section):
                if "read_by" in item.metadata:
                    yield type(section), item


def other_value(item):
    """A value that the field may have and that is not its default."""
    values = [*item.metadata.get("choices", ()), 2, 0.25, -0.5, "a:b", True, ["a"], {"a": 1}]
    kinds = {"str": str, "bool": bool, "list": list, "dict": dict, "Any": str}
    kind = kinds.get(re.split(r"\W", item.type)[0], (int, float))
    if "read_by" in item.metadata and item.type.startswith("list[float"):
        return [0.5, 0.5]
    for value in values:
        is_other = isinstance(value, kind) and value != default_of(item)
        if is_other and value_problem("key", value, item) is None:
            return value
    raise AssertionError(item.name)


@pytest.mark.parametrize(
    ("kind", "item"), conditional_fields(), ids=lambda each: getattr(each, "name", "")
)
def test_key_without_reader_is_refused(kind, item):
    """With every choice that does not read it, and with no other."""
    of = item.metadata.get("of", "name")
    (choosing,) = [other for other in fields(kind) if other.name == of]
    allowed = choosing.metadata["choices"]
    assert set(item.metadata["read_by"]) < set(allowed)
    for choice in allowed:
        problems = list(field_problems(kind(**{of: choice, item.name: other_value(item)}), "x."))
        told = [line for line in problems if "has no effect with" in line]
        if choice in item.metadata["read_by"]:
            assert told == []
        else:
            (line,) = told
            assert line.startswith(f"x.{item.name}=")
            assert line.endswith(f"={choice}, only with {', '.join(item.metadata['read_by'])}")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR and MASTER_PORT"]),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"},
            ["RANK=2", "WORLD_SIZE=2"],
        ),
        (
            {"RANK": "zero", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"},
            ["RANK=zero"],
        ),
    ],
)
def test_incomplete_rank_environment_gives_one_clear_message(
    environment, expected, capsys, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in expected)


SLURM_TASK = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "77",
}


def test_srun_task_is_a_rank_and_salloc_shell_is_not():
    environment = dict(SLURM_TASK)
    found = find_rank(environment)
    assert (found.rank, found.world_size, found.local_rank) == (5, 8, 1)
    assert (found.node, found.nodes, found.launcher) == (1, 2, "srun")
    assert environment["MASTER_ADDR"] == "gpu03"
    for shell in (
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"},
        {**SLURM_TASK, "SLURM_STEP_ID": str(0xFFFFFFFA)},
        {**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "1"},
    ):
        assert find_rank(shell) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a1,b[2-3]", "a1"),
        ("n[7]", "n7"),
    ],
)
def test_first_host_of_a_slurm_list(nodes, first):
    assert first_host(nodes) == first


def test_wrong_overrides_leave_no_files(tmp_path):
    main(["strategy=hybird"])
    assert "outputs" not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    "owner",
    [
        os.getuid(),
        pytest.param(
            65534,
            marks=pytest.mark.skipif(
                os.getuid() != 0, reason="only root can make links for somebody else"
            ),
        ),
    ],
)
@pytest.mark.parametrize(
    "place", ["train.log", ".hydra/config.yaml", "logs", "tensorboard/shard/events", "checkpoints"]
)
def test_a_run_directory_with_a_link_is_refused(tmp_path, capsys, place, owner):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    os.lchown(link, owner, owner)
    assert main([*TEXT, f"hydra.run.dir={tmp_path}/run"]) == 2
    says = "a symbolic link, which" if owner == os.getuid() else "a link that another user has made"
    said = capsys.readouterr().err
    assert f"hydra.run.dir: {link}: {says}" in said
    assert (f"checkpoint.folder={outside} has checkpoints elsewhere" in said) == (
        place == "checkpoints" and owner == os.getuid()
    )
    assert outside.read_text() == "mine"
    link.unlink()
    link.mkdir()
    if place == "train.log":
        assert main([*TEXT, f"hydra.run.dir={tmp_path}/run"]) == 2
        assert f"{link}: not a regular file" in capsys.readouterr().err


def test_import_path_searches_current_folder_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    (tmp_path / "own_part.py").write_text("def build(): pass")
    load_reference("model.target", "own_part:build")
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("limit", "needs"),
    [(24, "a rank of 9 needs up to 64"), (70, "the launcher of 9 ranks needs up to 87")],
)
def test_a_low_limit_of_open_files_is_named(monkeypatch, capsys, limit, needs):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    # Otherwise this process would keep the low limit for all tests that follow.
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert main([*TEXT, "launch.nproc_per_node=9"]) == 2
    told = f"a process may open {limit} files, and {needs}: raise the hard limit to {needs[-2:]}"
    assert told in capsys.readouterr().err
