"""Named validation sets, and `train.epochs`: samples, their number, and independence of the
layout.
"""

from pathlib import Path

import jobs
import pytest

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.data import main as prepare
from parallel2d.training.data.opening import open_data


@pytest.fixture
def folder(folder):
    (folder / "sums.txt").write_text("".join(f"{i} and {i} is {2 * i}\n" for i in range(300)))
    (folder / "short.txt").write_text("a few words\n")
    return folder


def data_of(folder: Path, **options):
    config = DataConfig(
        **{"name": "text", "path": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")}
        | options
    )
    return open_data(config, seed=0, seq_len=16)


# Named sets

SUMS = "sums: {path: sums.txt}"
SHORT = "short: {path: short.txt, packing: padded}"
SAME = "same: {validation_fraction: 0.02}"
VALIDATED = ("train.validate_every=2", "train.steps=4", "checkpoint.enabled=false")


def losses(folder, name):
    rows = [row for row in jobs.rows(folder / name) if row["step"] % 2 == 0]
    return [{k: v for k, v in row.items() if k.startswith("validation/")} for row in rows]


@pytest.mark.slow
def test_each_validation_set_has_its_own_loss_on_every_layout(ranks, folder):
    runs = {
        "one": (1, f"{{{SUMS}, {SHORT}, {SAME}}}", ()),
        "hybrid": (4, f"{{{SAME}, {SHORT}, {SUMS}}}", ("mesh.replicate=2",)),
        "tensor": (4, f"{{{SUMS}, {SHORT}, {SAME}}}", ("mesh.tensor=2",)),
    }
    for name, (count, sets, words) in runs.items():
        words = (*VALIDATED, f"data.validation={sets}", *words)
        ranks.run(count, jobs.run_to_the_end, str(folder), str(folder / name), words)
    first = losses(folder, "one")
    keys = [
        "validation/loss",
        "validation/same/loss",
        "validation/short/loss",
        "validation/sums/loss",
    ]
    assert [sorted(row) for row in first] == [keys, keys]
    for name in ("hybrid", "tensor"):
        for row, expected in zip(losses(folder, name), first, strict=True):
            assert row == pytest.approx(expected, rel=1e-10, abs=0)
    same, held_out = ([row[key] for row in first] for key in (keys[1], keys[0]))
    assert same == held_out
    assert len({row["validation/sums/loss"] for row in first}) == 2


def test_named_validation_sets_do_not_change_training(ranks, folder):
    named = (*VALIDATED, f"data.validation={{{SUMS}}}")
    runs = {"plain": VALIDATED, "named": named, "alone": (*named, "data.validation_fraction=0")}
    for name, words in runs.items():
        ranks.run(1, jobs.run_to_the_end, str(folder), str(folder / name), words)
    for key in ("loss", "grad_norm", "data/batch_hash"):
        plain, other = ([row[key] for row in jobs.rows(folder / n)] for n in ("plain", "named"))
        assert plain == other
    # Without a held-out part only the named losses exist.
    assert [list(row) for row in losses(folder, "alone")] == [["validation/sums/loss"]] * 2


def test_validation_set_is_fully_read_without_a_fraction(folder):
    path = str(folder / "sums.txt")
    data = data_of(folder, validation={"whole": {"path": path}})
    assert data.named_validation["whole"].end.policy == "pad"
    alone = data_of(folder, path=path, validation_fraction=0.0)
    assert len(data.named_validation["whole"]) == len(alone.train)
    part = data_of(folder, validation={"part": {"validation_fraction": 0.5}})
    half = data_of(folder, validation_fraction=0.5)
    assert len(part.named_validation["part"]) == len(half.validation)


def test_held_out_part_of_a_prepared_folder_is_read(folder):
    for name, fraction in (("parts", "0.5"), ("whole", "0")):
        words = ["prepare", str(folder / "corpus.txt"), "--output", str(folder / name)]
        assert prepare([*words, "--validation-fraction", fraction]) == 0
    sets = {name: {"name": "tokens", "path": str(folder / name)} for name in ("parts", "whole")}
    data = data_of(folder, validation=sets)
    parts, whole = (
        open_data(DataConfig(name="tokens", path=str(folder / name)), seed=0, seq_len=16)
        for name in ("parts", "whole")
    )
    assert len(data.named_validation["parts"]) == len(parts.validation)
    assert len(data.named_validation["whole"]) == len(whole.train)


def test_validation_sets_are_not_in_the_data_fingerprint(folder):
    plain, named = (
        data_of(folder),
        data_of(folder, validation={"a": {"path": str(folder / "sums.txt")}}),
    )
    assert plain.fingerprint == named.fingerprint
    assert plain.validation_fingerprint != named.validation_fingerprint


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"path": "nowhere.txt"}, r"data\.validation\.it: .*nowhere\.txt"),
        ({"pth": "x"}, r"data\.validation\.it\.pth: a set may have .*did you mean path"),
        ({"epochs": 2}, r"data\.validation\.it\.epochs: a set may have"),
        ({"path": 7}, r"data\.validation\.it\.path=7 must be text or null"),
        ("sums.txt", r"data\.validation\.it=sums\.txt must have the form"),
        ({"packing": "tight"}, r"data\.validation\.it\.packing=tight is not one of packed, padded"),
        ({"split": "test"}, r"data\.validation\.it\.split=test has no effect with .*only with hf"),
        ({"name": "custom", "target": "a:b"}, "all sets are custom, or none"),
    ],
)
def test_wrong_validation_set_gives_one_message(folder, entry, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        data_of(folder, validation={"it": entry})
    assert "Traceback" not in str(caught.value)


def test_wrong_name_of_a_validation_set_gives_one_message(folder):
    with pytest.raises(ConfigError, match="a set's name has only letters, digits"):
        data_of(folder, validation={"a/b": {}})


# Epochs

SHORT_EPOCH = (
    "data.path=sums.txt",
    "data.validation_fraction=0",
    "checkpoint.every=10",
    "optimizer.lr=0.01",
)


def sums(folder, **options):
    path = str(folder / "sums.txt")
    return data_of(folder, path=path, validation_fraction=0.0, **options).train


def samples_of(folder):
    return len(sums(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "count", "layout"), [("drop", 4, "mesh.replicate=2"), ("pad", 2, "mesh.tensor=2")]
)
def test_epochs_set_the_steps_from_the_size_of_the_data(ranks, folder, end, count, layout):
    samples, batch = samples_of(folder), 192
    steps = 2 * samples // batch if end == "drop" else -(-2 * samples // batch)
    assert 2 * samples % batch, "the last global batch must not be full"
    words = (*SHORT_EPOCH, "train.epochs=2", f"data.end={end}", f"train.global_batch_size={batch}")
    arguments = (str(folder), str(folder / "run"), (*words, layout))
    assert ranks.run(count, jobs.run_to_the_end, *arguments) == [(steps, None)] * count
    rows = jobs.rows(folder / "run")
    # The samples are known without a layout.
    stream = sums(folder, epochs=2, end=end)
    batches = [stream.read(range(first, first + batch)) for first in range(0, steps * batch, batch)]
    assert [row["data/batch_hash"] for row in rows] == [each.hash for each in batches]
    assert rows[-1]["tokens"] == sum(each.valid_tokens for each in batches)
    # The learning rate is at its floor in the last step, as the schedule defines.
    assert rows[-1]["learning_rate"] == pytest.approx(0.001)


def test_a_resumed_run_ends_at_the_same_step(ranks, folder):
    words = (*SHORT_EPOCH, "train.epochs=1", "checkpoint.every=2", "train.global_batch_size=64")
    ranks.run(1, jobs.run, str(folder), str(folder / "run"), words, 3)
    for epochs in (1, 2):
        more = (*words, f"train.epochs={epochs}")
        found = ranks.run(1, jobs.run_to_the_end, str(folder), str(folder / "run"), more)
        assert found == [(epochs * samples_of(folder) // 64, None)]
    assert jobs.rows(folder / "run")[-1]["samples"] == 2 * samples_of(folder) // 64 * 64


def test_settings_that_conflict_with_epochs_are_refused_with_known_data(ranks, folder):
    from workers import WorkerError

    steps = samples_of(folder) // 16
    cases = {
        f"scheduler.warmup_steps={steps}": (
            rf"warmup_steps={steps} must be below "
            rf"train\.steps={steps} \(train\.epochs=1 of"
        ),
        "train.global_batch_size=4096": "do not fill a global batch",
    }
    for word, problem in cases.items():
        words = (*SHORT_EPOCH, "train.epochs=1", word)
        with pytest.raises(WorkerError, match=problem):
            ranks.run(1, jobs.run_to_the_end, str(folder), str(folder / "run"), words)
