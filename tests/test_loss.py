"""The loss against torch's own, over the full and the split vocabulary; the mean over valid
tokens, for any distribution over ranks.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel2d.parallel.loss import chunk_elements, cross_entropy_sum, loss_chunks, token_weight
from parallel2d.parallel.mesh import build_mesh
from parallel2d.parallel.mesh_sizes import MeshSpec


def case(dtype, rows=37, vocab=11):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3
    logits = logits.to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[::4] = -100
    return logits, targets


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("chunk", [1, 100, 10**9])
def test_cross_entropy_sum_equals_torch(dtype, tolerance, chunk):
    logits, targets = case(dtype)
    with loss_chunks(chunk):
        ours = cross_entropy_sum(logits, targets)
        (ours * 0.5).backward()
    gradient, logits.grad = logits.grad, None
    precise = logits.detach().double().requires_grad_()
    theirs = F.cross_entropy(precise, targets, reduction="sum")
    (theirs * 0.5).backward()
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours.item() == pytest.approx(
        theirs.item(), rel=1e-6 if dtype != torch.float64 else 1e-13
    )
    assert gradient.dtype == dtype
    assert torch.allclose(gradient.double(), precise.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_cross_entropy_gradient_equals_the_derivative(z_loss):
    logits, targets = case(torch.float64, rows=5, vocab=4)
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x, targets, z_loss), (logits,))


def test_z_loss_is_the_squared_log_sum_exp_of_valid_tokens():
    logits, targets = case(torch.float64)
    ours = cross_entropy_sum(logits, targets, z_loss=0.3) - cross_entropy_sum(logits, targets)
    expected = 0.3 * logits.logsumexp(1)[targets != -100].square().sum()
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)


def test_huge_logits_and_only_ignored_targets_stay_finite():
    logits = torch.tensor([[1e4, -1e4], [3e38, 0.0]], requires_grad=True)
    value = cross_entropy_sum(logits, torch.tensor([1, 0]))
    value.backward()
    assert value.item() == pytest.approx(2e4)
    assert logits.grad.isfinite().all()
    nothing = cross_entropy_sum(logits, torch.tensor([-100, -100]))
    assert nothing.item() == 0


def test_only_one_chunk_is_held_in_full_precision():
    rows, vocab = 4096, 512
    logits = torch.randn(rows, vocab, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    with loss_chunks(2**15), torch.profiler.profile(profile_memory=True) as profile:
        cross_entropy_sum(logits, targets).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < rows * vocab * 4  # a copy in fp32 would be this large


def test_loss_uses_few_chunks_on_a_gpu():
    """A micro-batch of 16,384 tokens and a vocabulary of 128,256: each chunk costs about 16 kernel
    launches.
    """
    rows = chunk_elements("cuda") // 128_256
    assert -(-16_384 // rows) <= 16
    assert chunk_elements("cpu") == 2**22


def _split_vocabulary(vocab):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = build_mesh(MeshSpec(tensor=2), "ddp")["tensor"]
    logits, targets = case(torch.float64, vocab=vocab)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    expected = expected + 0.1 * logits.logsumexp(1)[targets != -100].square().sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    split = DTensor.from_local(logits.detach(), mesh, [Replicate()])
    split = split.redistribute(placements=[Shard(1)]).requires_grad_()
    value = cross_entropy_sum(split, targets, z_loss=0.1)
    value.backward()
    return value.item() - expected.item(), (split.grad.full_tensor() - gradient).abs().max().item()


@pytest.mark.parametrize("vocab", [10, 11])
def test_vocabulary_parallel_loss_equals_cross_entropy(ranks, vocab):
    for value, gradient in ranks.run(2, _split_vocabulary, vocab):
        assert abs(value) < 1e-10
        assert gradient < 1e-12


def _weights(valid, sizes):
    mesh = build_mesh(MeshSpec(**sizes), "hybrid")
    return token_weight(valid[dist.get_rank()], mesh).item()


def test_token_weight_counts_each_data_ranks_tokens_once(ranks):
    assert ranks.run(4, _weights, [1, 2, 3, 4], {}) == [pytest.approx(4 / 10)] * 4
    assert ranks.run(4, _weights, [1, 1, 4, 4], {"tensor": 2}) == [pytest.approx(2 / 5)] * 4
    assert ranks.run(4, _weights, [0, 0, 0, 0], {}) == [0.0] * 4


def _wrong_target(wrong):
    from torch.distributed.tensor import DTensor, Shard

    mesh = build_mesh(MeshSpec(tensor=2), "ddp")["tensor"]
    whole = torch.zeros(3, 8)
    for logits in (whole, DTensor.from_local(whole[:, :4], mesh, [Shard(1)])):
        with pytest.raises(RuntimeError, match="no logit: the last dim of the logits is 8"):
            cross_entropy_sum(logits, torch.tensor([0, wrong, -100]))


@pytest.mark.parametrize("wrong", [8, 99, -1])
def test_a_target_without_a_logit_is_an_error(ranks, wrong):
    ranks.run(2, _wrong_target, wrong)
