"""Choices of groups, precision and tensor parallelism by a user, each checked in the running
model.
"""

import pytest
import training
from test_parallelize import Nine, count
from workers import WorkerError, logged

from parallel2d import MeshSpec, ParallelConfig, build_mesh, build_on_meta, parallelize
from parallel2d.base.config import BucketingConfig, PrecisionConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.gradients import clip_gradient_norm
from parallel2d.parallel.loss import cross_entropy_sum
from parallel2d.parallel.model_structure import find_blocks
from parallel2d.parallel.parallelize.tensor_parallel import resolve_plan


def ends_with_one(module, name):
    return name.endswith("blocks.1")


def nothing(module, name):
    return False


@pytest.mark.parametrize("policy", [ends_with_one, "test_policies:ends_with_one"])
def test_a_callable_policy_chooses_the_groups(ranks, policy):
    config = {"strategy": "zero3", "bucketing": BucketingConfig("block", policy=policy)}
    assert ranks.run(2, count, config)[0] == {"allgather": 3, "reduce_scatter": 2}


def test_a_policy_that_chooses_nothing_lists_candidates_and_sizes():
    says = r"bucketing.policy=nothing chooses no module of Nine; candidates: .*Linear \(5 x"
    with pytest.raises(ConfigError, match=says):
        find_blocks(Nine(), (), nothing)
    with pytest.raises(ConfigError, match=r"bucketing.policy=no.such:thing cannot be imported"):
        find_blocks(Nine(), (), "no.such:thing")


BF16 = {"storage": "fp32", "param": "bf16", "reduce": "fp32"}


def test_fp32_modules_that_match_nothing_list_candidates(ranks):
    precision = PrecisionConfig(**BF16, fp32_modules=["LayerNrom"])
    message = r"no module of class LayerNrom.*candidates: .*LayerNorm \(3 x"
    with pytest.raises(WorkerError, match=message) as error:
        ranks.run(4, count, {"precision": precision})
    assert error.value.kind == "ConfigError"


WORDS = {
    "embedding": "rowwise",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w[13]": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "replicate",
    "output": "colwise_gather_output",
}


def _with_words(tensor):
    mesh = build_mesh(MeshSpec(tensor=tensor), "zero3")
    with build_on_meta():
        model = training.build_llama()
    plan = WORDS if tensor > 1 else None
    config = ParallelConfig("zero3", precision="fp64")
    with logged("parallel2d.parallel.parallelize.tensor_parallel") as lines:
        model = parallelize(model, mesh, config, seed=0, init=model.init_weights, tensor_plan=plan)
    tokens, targets = training.global_batch(0)
    loss = cross_entropy_sum(model(tokens), targets)
    loss.backward()
    return loss.item(), clip_gradient_norm(model.parameters(), 1.0).item(), lines


def test_tensor_plan_of_patterns_gives_equal_results_and_logs_replicated_modules(ranks):
    alone, split = ranks.run(1, _with_words, 1)[0], ranks.run(4, _with_words, 2)[0]
    assert split[:2] == pytest.approx(alone[:2], rel=1e-11)
    table = "\n".join(split[2])
    assert "parameters are split; replicated on every tensor rank:" in table
    assert "norm.weight: 1 x 32" in table
    assert "layers.*.attention_norm.weight: 1 x 32" in table
    assert "wq" not in table


def test_tensor_plan_with_brackets_is_read_from_overrides():
    from parallel2d.base.config.composition import compose

    words = ", ".join(f"{pattern}: {word}" for pattern, word in WORDS.items())
    # model=llama_debug brings its own and has no such key.
    with pytest.raises(ConfigError, match="unknown key model.tensor_plan"):
        compose([f"model.tensor_plan={{{words}}}"])
    library = ["model=hf", "model.architecture=llama"]
    given = compose([*library, f"model.tensor_plan={{{words}}}"]).config
    assert given is not None
    assert given.model.tensor_plan == WORDS


@pytest.mark.parametrize(("plan", "tensor", "message"), [
    ({"layers.*.attn.wq": "colwise"}, 2, "'layers.*.attn.wq' matches no module of Llama"),
    ({"layers.*.attention.w[qk]": "colwise"}, 4,
        "mesh.tensor=4 does not divide the 2 heads of layers.0.attention.wk"),
    ({"layers.*.feed_forward.w2": "rowwise"}, 5, "mesh.tensor=5 does not divide the 48 in_features"),
    ({"norm": "colwise"}, 2, "norm: colwise splits a Linear or an Embedding, not RMSNorm"),
    ({"output": "embedding_rowwise"}, 2, ("output: a Linear is split colwise or rowwise, not "
                                         "embedding_rowwise")),
    ({"norm": "sideways"}, 2, "norm: sideways is not one of colwise, rowwise, sequence, replicate"),
])  # fmt: skip
def test_invalid_tensor_plan_is_an_error(plan, tensor, message):
    with pytest.raises(ConfigError) as error:
        resolve_plan(training.build_llama(), plan, tensor)
    assert message in str(error.value)
