"""The examples run on several ranks and give the results that they claim. `own_loop.py` is run in
`test_command_line.py`, `ray_train.py` in `test_ray.py`.
"""

import functools
import importlib.util
import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).parent.parent / "examples"


@functools.cache
def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("llama"))
    example("finetune").build_small_llama(path)
    return path


def finetune(path: str, save: str | None, **options: Any) -> list[dict[str, float]]:
    return example("finetune").finetune(path, save, lr=3e-3, **options)


def load(path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    start = torch.randint(0, 64, (16, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + 3 * torch.arange(33)) % 64
    return F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("strategy", ["hybrid", "zero2"])
def test_a_saved_model_is_fine_tuned_as_in_one_process(ranks, small_llama, tmp_path, strategy):
    rows = ranks.run(
        4, finetune, small_llama, str(tmp_path / "new"), strategy=strategy, lora=0, steps=4
    )[0]
    expected = load(small_llama).train()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=3e-3, weight_decay=0.0)
    for row in rows:
        loss = loss_of(expected, row["step"])
        loss.backward()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    saved = load(str(tmp_path / "new"))
    assert type(saved).__name__ == "LlamaForCausalLM"
    for (name, ours), theirs in zip(saved.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.extras("transformers")
def test_only_adapters_are_trained_and_merged(ranks, small_llama, tmp_path):
    rows = ranks.run(4, finetune, small_llama, None, strategy="hybrid", lora=4, steps=4)[0]
    ranks.run(4, finetune, small_llama, str(tmp_path / "new"), strategy="hybrid", lora=4, steps=3)
    before, after = load(small_llama), load(str(tmp_path / "new"))
    assert rows[0]["loss"] == pytest.approx(loss_of(before, 1).item(), rel=1e-5)  # `up` is zero
    changed = [
        name
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    adapted = [f"model.layers.{layer}.self_attn" for layer in (0, 1)]
    assert changed == [f"{name}.{matrix}_proj.weight" for name in adapted for matrix in "qv"]
    assert rows[3]["loss"] == pytest.approx(loss_of(after, 4).item(), rel=1e-4)
    assert abs(loss_of(before, 4).item() - rows[3]["loss"]) > 1e-3


@pytest.mark.extras("transformers")
def test_a_saved_model_is_fine_tuned_by_the_train_command(ranks, small_llama, tmp_path):
    """Its vocabulary is enlarged for the bytes; the checkpoint becomes a folder that the library reads."""
    from parallel2d.checkpoint import main

    model = load(small_llama)
    model.resize_token_embeddings(320, mean_resizing=False)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "corpus.txt").write_text("\n".join(f"{(7 * i) % 97}" for i in range(40000)))
    words = ["model=hf", f"model.path={tmp_path / 'model'}", "strategy=hybrid"]
    ranks.run(4, jobs.run, str(tmp_path), "run", words, 4)
    rows = jobs.rows(tmp_path / "run")
    assert rows[3]["loss"] < rows[0]["loss"]

    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "new")
    places = [str(tmp_path / "run"), str(tmp_path / "new" / "model.safetensors")]
    assert main(["convert", *places, "--dtype", "fp32"]) == 0
    new, information = type(model).from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not information["missing_keys"]
    assert not information["unexpected_keys"]
    for (name, ours), theirs in zip(new.named_parameters(), model.parameters(), strict=True):
        assert ours.shape == theirs.shape
        assert 0 < (ours - theirs).abs().max() < 0.02, name  # four steps of 1e-3


def fabric(*words: str) -> list[dict[str, float]]:
    options = ["--devices", "4", "--accelerator", "cpu", "--steps", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = (str(EXAMPLES / "fabric.py"), *options, *words)
    done = jobs.run_python(*words, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


HOOKS = {"mlflow": "mlflow_hook:MLflowHook", "wandb": "wandb_hook:WandbHook"}


def hooked(folder: Path, steps: int) -> None:
    """Run a complete job with the hooks of the examples; it resumes an existing run."""
    hooks = [
        f"{{hook: '{HOOKS[name]}', every: 2}}" for name in HOOKS if importlib.util.find_spec(name)
    ]
    small = [word for word in jobs.SMALL if not word.startswith("train.steps")]
    words = [
        "hydra.run.dir=run",
        "launch.nproc_per_node=2",
        f"train.steps={steps}",
        "train.validate_every=3",
        f"train.hooks=[{', '.join(hooks)}]",
        "scheduler=constant",
    ]
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment["WANDB_MODE"] = "offline"
    words = ("-m", "parallel2d.train", *small, *words)
    done = jobs.run_python(*words, cwd=folder, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr


# Key -> steps that the hooks log
LOGGED = {"loss": (2, 4, 6), "grad_norm": (2, 4, 6), "validation/loss": (3, 4, 6)}


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory) -> Path:
    """A run up to step 4, and again up to step 6."""
    folder = tmp_path_factory.mktemp("logged")
    (folder / "corpus.txt").write_text("".join(f"{i} and {i} is {i + i}\n" for i in range(12000)))
    hooked(folder, 4)
    hooked(folder, 6)
    return folder / "run"


def rows_by_step(run: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in jobs.rows(run)}


@pytest.mark.extras("mlflow")
def test_the_mlflow_hook_logs_one_run_over_a_resume(logged_run):
    from mlflow import MlflowClient

    rows = rows_by_step(logged_run)
    client = MlflowClient(f"sqlite:///{logged_run}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("parallel2d").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.001"
    for key, steps in LOGGED.items():
        found = [
            (each.step, each.value) for each in client.get_metric_history(run.info.run_id, key)
        ]
        assert found == [(step, rows[step][key]) for step in steps]


def wandb_records(path: Path) -> list[Any]:
    """The records of a file of Weights & Biases: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15  # of a block; no record begins in its last bytes
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


@pytest.mark.extras("wandb")
def test_the_wandb_hook_logs_one_run_over_a_resume(logged_run):
    rows = rows_by_step(logged_run)
    files = sorted((logged_run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    records = [record for file in files for record in wandb_records(file)]
    ids = {record.run.run_id for record in records if record.HasField("run")}
    assert ids == {(logged_run / "wandb_run_id").read_text()}
    found: dict[str, dict[int, float]] = {}
    for record in records:
        for item in record.history.item if record.HasField("history") else ():
            name = item.key or "/".join(item.nested_key)
            found.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    for key, steps in LOGGED.items():
        assert found[key] == {step: rows[step][key] for step in steps}


@pytest.mark.extras("lightning.fabric")
def test_fabric_example_has_equal_losses_on_two_layouts(tmp_path):
    flat, split = (
        fabric("--save", str(tmp_path / "saved")),
        fabric("--tensor", "2", "--strategy", "zero3"),
    )
    assert [row["step"] for row in flat] == [1, 2, 3, 4]
    for ours, theirs in zip(flat, split, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert flat[-1]["loss"] < flat[0]["loss"]
    kinds = sorted(path.suffix for path in (tmp_path / "saved").iterdir())
    assert kinds == ["", *4 * [".distcp"], ".pt"]


@pytest.mark.extras("PIL", "transformers")
@pytest.mark.parametrize("model", ["vit", "network"])
def test_image_folder_example_has_equal_losses_on_two_layouts(ranks, tmp_path, model):
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for number, name in enumerate(("ant", "bee", "cat")):
        (tmp_path / "pictures" / name / "more").mkdir(parents=True)
        for index in range(20):
            pixels = draw.integers(0, 128, (10, 12, 3)) + np.array([number & 1, number & 2, 0]) * 60
            where = tmp_path / "pictures" / name / ("more" if index % 3 else "") / f"{index}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(where)
    sizes = (
        "num_labels: 3, num_attention_heads: 2, num_hidden_layers: 2, hidden_size: 16, "
        "intermediate_size: 24"
    )
    models = {
        "vit": [
            "model=hf",
            "model.architecture=vit",
            f"++model.arguments={{image_size: 8, patch_size: 4, {sizes}}}",
        ],
        "network": [
            "model=custom",
            "model.target=images:Network",
            "++model.arguments={classes: 3, width: 4}",
        ],
    }
    arguments = "{folder: pictures, size: 8, share: 0.2}"
    words = [
        *models[model],
        "data=custom",
        "data.target=images:build",
        f"data.arguments={arguments}",
        "train.validate_every=3",
        f"data.validation={{held: {{arguments: {arguments[:-1]}, held_out: true}}}}}}",
    ]
    for name, world in (("alone", 1), ("hybrid", 4)):
        ranks.run(world, jobs.run, str(tmp_path), str(tmp_path / name), words, 6)
    alone, hybrid = (jobs.rows(tmp_path / name) for name in ("alone", "hybrid"))
    for row, expected in zip(hybrid, alone, strict=True):
        for key in ("loss", "tokens", "data/batch_hash", "validation/held/loss"):
            assert row.get(key, 0) == pytest.approx(expected.get(key, 0), rel=1e-10, abs=0), key
    assert [row["tokens"] for row in alone] == [16 * step for step in range(1, 7)]
    assert alone[5]["validation/held/loss"] < alone[2]["validation/held/loss"]
