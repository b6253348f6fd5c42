"""A Llama-3-style decoder with its tensor-parallel plan: `Llama`, `tensor_plan`.

RMSNorm before each sub-layer, rotary position embedding, grouped-query attention, SwiGLU
feed-forward, optional weight tying (Dubey et al. 2024, "The Llama 3 Herd of Models"). The model
uses only PyTorch and does not depend on the training framework. Shapes are read from tensors and
not from the configuration. Therefore a module that has the weights of some heads computes exactly
these heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel2d.models.attention import grouped_attention


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosine and the sine of the rotation angles, each fp32 [seq, head_dim / 2].

    See RoFormer (Su et al. 2021). The angles are computed in each call from integer ``positions``
    [seq]. A cached table of floats would be rounded to bf16, because mixed precision casts the
    inputs of a block. Integers are not cast.
    """
    exponents = (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    )
    angles = torch.outer(positions.float(), theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dim against each other.

    The computation is in fp32 or a wider dtype, and the result has the dtype of ``x``. Element i of
    the first half is paired with element i of the second half, as in Hugging Face checkpoints.

    Args:
        x: [batch, heads, seq, head_dim].
        cos: [seq, head_dim / 2].
        sin: [seq, head_dim / 2].
    """
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, rope_theta: float) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.rope_theta = rope_theta
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Attend over the sequence.

        Args:
            x: [batch, seq, dim].
            positions: int64 [seq].
            mask: bool [batch, 1, seq, seq]; None: causal.
        """
        batch, seq, _ = x.shape
        query, key, value = (
            projection(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        cos, sin = rotary_angles(positions, self.head_dim, self.rope_theta)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = grouped_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm decoder layer: attention and feed-forward, each with a residual."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        hidden_dim: int,
        norm_eps: float,
        rope_theta: float,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = Attention(dim, n_heads, n_kv_heads, rope_theta)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.feed_forward = FeedForward(dim, hidden_dim)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The decoder. Keyword arguments are the keys of the ``model`` config group."""

    def __init__(
        self,
        *,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        hidden_dim: int,
        vocab_size: int,
        max_seq_len: int,
        norm_eps: float = 1e-5,
        rope_theta: float = 500000.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.max_seq_len = n_heads, n_kv_heads, max_seq_len
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            Block(dim, n_heads, n_kv_heads, hidden_dim, norm_eps, rope_theta)
            for _ in range(n_layers)
        )
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Return logits [batch, seq, vocab_size].

        Args:
            tokens: int64 [batch, seq].
            document_ids: int64 [batch, seq]; if given, a token attends only to earlier tokens of
                its own document.
        """
        seq = tokens.shape[1]
        mask = None
        if document_ids is not None:
            same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
            mask = same & torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).tril()
        positions = torch.arange(seq, device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.output(self.norm(x))

    def init_weights(self, module: nn.Module, name: str) -> None:
        """Set the parameters that ``module``, called ``name``, owns directly.

        Weights are normal with deviation 0.02; the projections into the residual stream are scaled
        down by the depth (Radford et al. 2019). Norms are one.
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.endswith((".wo", ".w2"))
            nn.init.normal_(
                module.weight, std=0.02 / (2 * len(self.layers)) ** 0.5 if residual else 0.02
            )
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


def tensor_plan(model: Llama, tensor: int) -> dict[str, object]:
    """Return module pattern -> parallel style for a tensor axis of ``tensor`` ranks.

    In each sub-layer the first matrices are column-parallel and the last matrix is row-parallel, so
    that it needs one all-gather and one reduce-scatter. Norms and residuals run on a slice of the
    sequence (Korthikanti et al. 2022). Logits stay split over the vocabulary for the loss. Raises
    ValueError if ``tensor`` does not divide the heads.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    if model.n_kv_heads % tensor or model.n_heads % tensor:
        raise ValueError(
            f"mesh.tensor={tensor} does not divide the heads: n_heads={model.n_heads}, "
            f"n_kv_heads={model.n_kv_heads}"
        )
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
