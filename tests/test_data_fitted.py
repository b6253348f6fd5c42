"""Global batches by tokens: whole documents in each row, work in balance over ranks, and the
gradient of one process on every layout.
"""

import json

import jobs
import numpy as np
import pytest
import torch
from test_data_open import plan, text_config

from parallel2d.base.errors import ConfigError
from parallel2d.training.data.batch import IGNORED
from parallel2d.training.data.opening import open_data

SEQ, END = 24, 256
WORDS = (
    "train.tokens_per_batch=256",
    "train.seq_len=32",
    "data.path=rows.jsonl",
    "data.cache_dir=cache",
)


def write_rows(folder):
    """Documents of 2 to 60 letters, a few of them long."""
    sizes = np.random.default_rng(0).integers(2, 20, 400)
    sizes[::9] = 60
    texts = [chr(97 + number % 26) * int(size) for number, size in enumerate(sizes)]
    rows = [json.dumps({"text": each}) + "\n" for each in texts]
    (folder / "rows.jsonl").write_text("".join(rows))
    return texts


def fitted(folder, **options):
    (folder / "cache").mkdir(exist_ok=True)
    given = {"packing": "fitted", "intra_document_masking": True, "validation_fraction": 0.0}
    config = text_config(folder, 1, **given, **options)
    config.path, config.cache_dir = str(folder / "rows.jsonl"), str(folder / "cache")
    return open_data(config, seq_len=SEQ, seed=0).train


def test_fitted_rows_hold_complete_documents_once_with_little_padding(tmp_path):
    texts = write_rows(tmp_path)
    stream = fitted(tmp_path)
    batch = stream.read(list(range(len(stream))))
    found = []
    for inputs, targets, ids in zip(batch.inputs, batch.targets, batch.document_ids, strict=True):
        assert (ids.diff() >= 0).all()
        for document in ids.unique():
            own = ids == document
            valid = targets[own] != IGNORED
            if valid.any():
                # The targets are the inputs one later, and after the last letter the end.
                letters = inputs[own].tolist()
                assert targets[own].tolist()[:-1] == letters[1:]
                assert targets[own][-1] in (letters[0], END)
                found.append((letters[0], len(letters)))
            else:
                assert (inputs[own] == END).all()
    expected = [(ord(each[0]), min(len(each), SEQ)) for each in texts]
    assert sorted(found) == sorted(expected)
    padding = 1 - sum(size for _, size in expected) / batch.inputs.numel()
    assert padding < 0.02


def test_rows_are_balanced_over_ranks_by_estimated_flops(tmp_path):
    write_rows(tmp_path)
    stream = fitted(tmp_path)
    stream.weigh(2)
    work, tokens = stream.loads(16, 16)
    assert tokens.max() <= SEQ
    plans = [plan(16, rank, 4, micro_batch_size=2) for rank in range(4)]
    shares = [each.positions(16, work.tolist()) for each in plans]
    assert sorted(np.ravel(shares).tolist()) == list(range(16, 32))
    sums = [sum(int(work[at - 16]) for at in np.ravel(share)) for share in shares]
    plain = [sum(int(work[at - 16]) for at in np.ravel(each.positions(16))) for each in plans]
    assert max(sums) - min(sums) < max(plain) - min(plain)
    assert plans[0].imbalance(work.tolist()) == pytest.approx(max(sums) / np.mean(sums))
    # The same samples for any number of ranks, also where they do not divide the batch
    odd = [plan(16, rank, 3, micro_batch_size=2, allow_padding=True) for rank in range(3)]
    positions = [at for each in odd for part in each.positions(16, work.tolist()) for at in part]
    assert sorted(at for at in positions if at is not None) == list(range(16, 32))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.tokens_per_batch=100", "train.seq_len=32"), "must be a multiple of train.seq_len"),
        (
            ("train.tokens_per_batch=256", "train.seq_len=32", "train.global_batch_size=12"),
            "are 8 sequences, and train.global_batch_size=12",
        ),
        (("train.tokens_per_batch=128", "data=bin", "data.path=a"), "data=bin has none"),
    ],
)
def test_contradicting_keys_are_refused(words, message):
    with pytest.raises(ConfigError) as error:
        jobs.config_of(words)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "strategy",
    [
        "hybrid",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero3", "ddp", "hybrid_full")),
    ],
)
def test_losses_and_batches_equal_one_process_on_any_mesh(ranks, folder, strategy):
    write_rows(folder)
    words = [*WORDS, "train.global_batch_size=8", "train.micro_batch_size=1"]
    ranks.run(1, jobs.run, str(folder), str(folder / "alone"), [*words, "strategy=ddp"], 6)
    ranks.run(4, jobs.run, str(folder), str(folder / "run"), [*words, f"strategy={strategy}"], 4)
    ranks.run(2, jobs.run, str(folder), str(folder / "run"), [*words, "strategy=zero3"], 2)
    alone, rows = jobs.rows(folder / "alone"), jobs.rows(folder / "run")
    for row, other in zip(rows, alone, strict=True):
        for key in ("loss", "data/batch_hash", "tokens", "data/padding"):
            assert row[key] == pytest.approx(other[key], rel=1e-10, abs=0), key
        assert other["data/imbalance"] == pytest.approx(1.0)
        assert 1.0 <= row["data/imbalance"] < 1.2
        assert 0 <= row["data/padding"] < 0.1


def test_documents_of_a_row_do_not_attend_to_each_other(tmp_path):
    """The gradient of packed rows is that of each document alone."""
    from training import build_llama, loss_of_logits

    torch.manual_seed(0)
    model = build_llama(vocab_size=END + 1).double()
    write_rows(tmp_path)
    batch = fitted(tmp_path).read(list(range(6)))
    assert batch.document_ids is not None
    loss = torch.zeros((), dtype=torch.float64)
    for inputs, targets, ids in zip(batch.inputs, batch.targets, batch.document_ids, strict=True):
        for document in ids.unique():
            own = (ids == document).nonzero().flatten()
            loss = loss + loss_of_logits(model, inputs[own][None], targets[own][None])
    import parallel2d

    logits = model(batch.inputs, batch.document_ids)
    packed = parallel2d.cross_entropy_sum(logits, batch.targets)
    assert packed.item() == pytest.approx(loss.item(), rel=1e-10)
