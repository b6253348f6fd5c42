"""The model: attention masks, invariants of the rotation, and the number of parameters of each
configuration.
"""

import jobs
import pytest
import torch
import torch.nn.functional as F
import training
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel2d.models.attention import grouped_attention
from parallel2d.models.llama import rotary_angles, rotate, tensor_plan
from parallel2d.training.model_families import build_model


@pytest.fixture
def model():
    torch.manual_seed(0)
    return training.build_llama(n_layers=2).double()


def test_token_attends_only_to_earlier_tokens(model):
    tokens = torch.randint(0, training.VOCAB, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % training.VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_token_attends_only_to_its_document(model):
    first, second = torch.randint(0, training.VOCAB, (2, 6))
    packed = torch.cat([first, second])[None]
    ids = torch.tensor([[0] * 6 + [1] * 6])
    logits = model(packed, ids)
    other = model(torch.cat([(first + 1) % training.VOCAB, second])[None], ids)
    assert torch.allclose(logits[:, 6:], other[:, 6:], atol=1e-12)
    assert not torch.allclose(logits[:, :6], other[:, :6])
    assert torch.allclose(logits[:, :6], model(first[None]), atol=1e-12)


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "heads"),
    [
        ("cuda", torch.bfloat16, False, 2),
        ("cuda", torch.float32, False, 8),
        ("cuda", torch.bfloat16, True, 8),
        ("cpu", torch.float32, True, 2),
    ],
)
def test_keys_are_repeated_where_no_fused_kernel_takes_fewer_heads(
    monkeypatch, device, dtype, masked, heads
):
    seen = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, *kv, **o: seen.extend(kv) or attend(q, *kv, **o),
    )
    with FakeTensorMode():
        query = torch.empty(1, 8, 4, 16, device=device, dtype=dtype)
        key = torch.empty(1, 2, 4, 16, device=device, dtype=dtype)
        mask = torch.empty(4, 4, device=device, dtype=torch.bool) if masked else None
        assert grouped_attention(query, key, key, mask, enable_gqa=True).shape == query.shape
    assert [each.shape[1] for each in seen] == [heads, heads]


def test_rotation_preserves_length_and_depends_on_distance_only():
    cos, sin = rotary_angles(torch.arange(32), 8, 10000.0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 32, 8)
    turned_query, turned_key = rotate(query, cos, sin), rotate(key, cos, sin)
    assert torch.allclose(turned_query.norm(dim=-1), query.norm(dim=-1))
    scores = turned_query[0, 0] @ turned_key[0, 0].T
    assert scores[5, 2].item() == pytest.approx(scores[25, 22].item(), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("debug", 820_352),
        ("15m", 15_191_712),
        ("160m", 162_417_408),
        ("1b", 1_235_814_400),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_configurations_have_the_published_sizes(name, parameters):
    module = build_model(jobs.config_of([f"model=llama_{name}"]).model).module
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert all(p.is_meta for p in module.parameters())


def test_heads_that_do_not_divide_are_an_error(model):
    says = "mesh.tensor=4 does not divide the heads: n_heads=4, n_kv_heads=2"
    with pytest.raises(ValueError, match=says):
        tensor_plan(model, 4)


@pytest.mark.slow
def test_masked_documents_have_equal_losses_on_every_layout(ranks, tmp_path):
    (tmp_path / "corpus.jsonl").write_text(
        "".join(f'{{"text": "{i} squared is {i * i}"}}\n' for i in range(4000))
    )
    losses = []
    for world, words in ((1, ()), (4, ("mesh.tensor=2",))):
        words = (
            *words,
            "data.path=corpus.jsonl",
            "data.intra_document_masking=true",
            "checkpoint.enabled=false",
        )
        ranks.run(world, jobs.run, str(tmp_path), str(tmp_path / f"run{world}"), words, 4)
        losses.append([row["loss"] for row in jobs.rows(tmp_path / f"run{world}")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10, abs=0)
