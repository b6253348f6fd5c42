"""Modules that only some ranks run: gradients, updates and states of one process, and refusals."""

import copy
import json

import jobs
import pytest
import torch
from torch import nn

import parallel2d
from parallel2d import Always, ConfigError, MeshSpec, ParallelConfig
from parallel2d.base.config import BucketingConfig, CheckpointConfig, PrecisionConfig
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.model_structure import updated_as

DIM = 8
FP64 = PrecisionConfig("fp64", "fp64", "fp64", "fp64")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, 5)
        self.down = nn.Linear(5, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.patch = nn.Linear(3, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.frozen(x)

    def dummy_forward(self):
        return self(self.patch.weight.new_zeros(1, 3))


class Towers(nn.Module):
    """Text, and images or sounds for some samples, after ``early`` blocks."""

    def __init__(self, early=0):
        super().__init__()
        self.early = early
        self.vision, self.audio = Tower(), Tower(1)
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x, image=None, sound=None):
        x = self.first(x)
        for block in self.blocks[: self.early]:
            x = block(x)
        if image is not None:
            # The hidden state needs a gradient; the input of a dummy, like the sound, does not.
            x = x + self.vision(image + x[:, :3])
        if sound is not None:
            x = x + self.audio(sound)
        for block in self.blocks[self.early :]:
            x = block(x)
        return self.last(x)


# By pattern: (rank, micro-batch, step) -> whether the batch has an image, and a sound
PATTERNS = {
    "by rank": lambda rank, micro, step: (rank % 2 == 0, rank < 2),
    "one rank in one micro-batch": lambda rank, micro, step: (
        (rank, micro, step) == (1, 0, 0),
        rank == 3,
    ),
    "last micro-batch without": lambda rank, micro, step: (micro == 0, step == 1),
    "nobody in the second step": lambda rank, micro, step: (step != 1 and rank == 2, False),
}


def batch(rank, micro, step, pattern):
    generator = torch.Generator().manual_seed(rank * 100 + micro * 10 + step)
    x, image, sound = (
        torch.randn(4, size, dtype=torch.float64, generator=generator) for size in (DIM, 3, 3)
    )
    has_image, has_sound = PATTERNS[pattern](rank, micro, step)
    return x, image if has_image else None, sound if has_sound else None


def one_process(model, ranks, micros, steps, pattern):
    """Gradients of each step, and the parameters after the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    gradients = []
    for step in range(steps):
        for rank in range(ranks):
            for micro in range(micros):
                (model(*batch(rank, micro, step, pattern)).square().mean() / ranks).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: each.detach() for name, each in model.named_parameters()}


def full(tensor):
    return None if tensor is None else tensor.full_tensor()


def difference(one, other):
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return (one - other).abs().max().item()


def train(sizes, config, conditional, mode, pattern, steps=3, micros=2):
    """The largest difference to one process, of all gradients and updates of all steps."""
    mesh = parallel2d.build_mesh(MeshSpec(**sizes), config.strategy)
    ranks, rank = mesh_shape(mesh).data_ranks, parallel2d.data_coordinate(mesh)
    torch.manual_seed(3)
    reference = Towers(early=int(conditional["audio"] == "replicate")).double()
    model = parallel2d.parallelize(copy.deepcopy(reference), mesh, config, conditional=conditional)
    gradients, parameters = one_process(reference, ranks, micros, steps, pattern)
    optimizer = torch.optim.AdamW(parallel2d.updated_parameters(model), lr=0.1, weight_decay=0.5)
    parallel2d.attach_optimizer(model, optimizer)
    worst = {}
    for step in range(steps):
        batches = [batch(rank, micro, step, pattern) for micro in range(micros)]
        with torch.no_grad():
            model(*batches[rank % micros])  # an evaluation
        for each in parallel2d.accumulate(model, batches, mode):
            model(*each).square().mean().backward()
        for name, parameter in model.named_parameters():
            worst[step, name] = difference(full(updated_as(parameter).grad), gradients[step][name])
        optimizer.step()
        optimizer.zero_grad()
    state = parallel2d.full_state(model, rank0_only=False)["model"]
    for name, value in parameters.items():
        worst["state", name] = difference(state[name], value)
    return {key: value for key, value in worst.items() if not value < 1e-10}


HYBRID = {"replicate": 2, "shard": 2}
LAYOUTS = [
    (HYBRID, "hybrid", "block", "reduce_scatter_only"),
    (HYBRID, "hybrid_full", "block", "reduce_scatter_only"),
    ({"replicate": 1, "shard": 4}, "zero3", "block", "none"),
    ({"replicate": 1, "shard": 4}, "zero2", BucketingConfig("size", 0.001), "full"),
    ({"replicate": 4, "shard": 1}, "ddp", "block", "full"),
    (HYBRID, "hybrid", BucketingConfig("size", 0.001), "none"),
]
WAYS = [
    {"vision": "replicate", "audio": "replicate"},
    {"vision": "root", "audio": "replicate"},
    {"vision": "always", "audio": "always"},
    {"vision": Always(before="blocks.1"), "audio": "replicate"},
]


def all_patterns(sizes, strategy, bucketing, mode, conditional):
    config = ParallelConfig(strategy, bucketing, FP64)
    return {name: train(sizes, config, conditional, mode, name) for name in PATTERNS}


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize(
    "layout",
    [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, len(LAYOUTS)))],
)
def test_gradients_and_updates_equal_one_process(ranks, layout, way):
    for found in ranks.run(4, all_patterns, *LAYOUTS[layout], WAYS[way]):
        assert found == {name: {} for name in PATTERNS}


def save_and_resume(folder, conditional, other_sizes, other_strategy, other_conditional):
    """As `train`, but the second and third step run on another layout, from a checkpoint."""
    torch.manual_seed(3)
    reference = Towers().double()
    first = copy.deepcopy(reference)
    pattern = "by rank"
    _, parameters = one_process(reference, 4, 1, 3, pattern)
    layouts = [(HYBRID, "hybrid", conditional), (other_sizes, other_strategy, other_conditional)]
    for number, (sizes, strategy, ways) in enumerate(layouts):
        mesh = parallel2d.build_mesh(MeshSpec(**sizes), strategy)
        config = ParallelConfig(strategy, precision=FP64)
        model = parallel2d.parallelize(copy.deepcopy(first), mesh, config, conditional=ways)
        optimizer = torch.optim.AdamW(
            parallel2d.updated_parameters(model), lr=0.1, weight_decay=0.5
        )
        parallel2d.attach_optimizer(model, optimizer)
        saver = parallel2d.Checkpointer(CheckpointConfig(), folder, mesh, model, optimizer)
        if number:
            assert saver.restore() is not None
        for step in range(1) if number == 0 else range(1, 3):
            rank = parallel2d.data_coordinate(mesh)
            model(*batch(rank, 0, step, pattern)).square().mean().backward()
            norm = parallel2d.clip_gradient_norm(model.parameters(), float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        saver.save_if_due(step + 1, {}, last=True)
    assert norm.isfinite()
    parallel2d.compare_replicas(model, mesh)
    state = parallel2d.full_state(model, rank0_only=False)["model"]
    return {name: difference(state[name], value) for name, value in parameters.items()}


@pytest.mark.parametrize("number", [0, 1])
def test_resume_on_another_mesh_and_way_equals_one_process(ranks, tmp_path, number):
    other = [
        ({"replicate": 1, "shard": 4}, "zero3", WAYS[2]),
        ({"replicate": 2, "shard": 2}, "hybrid_full", WAYS[0]),
    ][number]
    for found in ranks.run(4, save_and_resume, tmp_path, WAYS[number], *other):
        assert max(found.values()) < 1e-10


class Captions(nn.Module):
    """A model of text with a tower for sequences whose first token is a multiple of 7."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(320, 16), nn.Linear(16, 320)
        self.vision = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        has_image = tokens[:, :1, None] % 7 == 0
        if has_image.any():
            x = x + has_image * self.vision(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


JOB = (
    "model=custom",
    "model.target=test_conditional:Captions",
    "model.conditional={vision: replicate}",
)


def test_train_command_predicts_bytes_and_keeps_the_losses_of_one_process(ranks, folder):
    words = (*JOB, "train.micro_batch_size=2", "train.global_batch_size=8")
    ranks.run(1, jobs.run, str(folder), str(folder / "alone"), (*words, "strategy=ddp"), 3)
    for strategy in ("hybrid", "zero3"):
        run = folder / strategy
        ranks.run(4, jobs.run, str(folder), str(run), (*words, f"strategy={strategy}"), 3)
        for row, other in zip(jobs.rows(run), jobs.rows(folder / "alone"), strict=True):
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-12)
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-12)
        for key, sent in json.loads((run / "layout.json").read_text())["predicted"].items():
            assert row[key] == sent, (strategy, key)


class Late(Towers):
    """The tower runs after the blocks."""

    def forward(self, x, image=None, sound=None):
        x = super().forward(x)
        return x if image is None else x + self.vision(image)


class Tied(Towers):
    def __init__(self):
        super().__init__()
        self.last.weight = self.vision.frozen.weight = nn.Parameter(torch.ones(DIM, DIM))


def wrong_dummies(number):
    """The messages of a rank with an image, and of a rank without one."""
    kind, conditional, _ = WRONG[number]
    mesh = parallel2d.build_mesh(MeshSpec(replicate=1, shard=2), "zero3")
    config = ParallelConfig("zero3", precision=FP64)
    torch.manual_seed(0)
    model = parallel2d.parallelize(kind().double(), mesh, config, conditional=conditional)
    rank = parallel2d.data_coordinate(mesh)
    x, image = torch.ones(2, DIM, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    try:
        model(x, image if rank == 0 else None).sum().backward()
    except ConfigError as error:
        return str(error)
    return ""


WRONG = [
    (Towers, {}, "name a module that only some ranks run (model.conditional={vision: replicate}"),
    (Late, {"vision": "always"}, "parallel2d.Always(before=NAME) gives the place of a dummy"),
    (
        Towers,
        {"vision": Always(lambda tower: tower.frozen.weight)},
        "conditional: the dummy of vision did not call the module",
    ),
    (
        Towers,
        {"vision": Always(lambda tower: [tower.dummy_forward(), None][1])},
        "conditional: the dummy of vision returned no floating-point tensor: return the output of "
        "the module",
    ),
    (
        Towers,
        {"vision": Always(lambda tower: tower.dummy_forward().detach())},
        "name a module that only some ranks run (model.conditional={vision: replicate}",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_different_modules_and_wrong_dummies_are_named(ranks, number):
    assert all(WRONG[number][-1] in found for found in ranks.run(2, wrong_dummies, number))


def refusals():
    mesh = parallel2d.build_mesh(MeshSpec(replicate=1, shard=1), "zero3")
    messages = []
    for kind, conditional, _ in REFUSED:
        with pytest.raises(ConfigError) as error:
            parallel2d.parallelize(kind(), mesh, ParallelConfig("zero3"), conditional=conditional)
        messages.append(str(error.value))
    return messages


REFUSED = [
    (
        Towers,
        {"vison": "root"},
        "conditional: vison is not a module of Towers; near: vision",
    ),
    (
        Towers,
        {"vision": "replicated"},
        "conditional: vision=replicated is not one of replicate, root, always; did you mean "
        "replicate?",
    ),
    (
        Towers,
        {"vision": "root", "vision.patch": "replicate"},
        "conditional: vision.patch is inside vision, which is conditional too: name only vision",
    ),
    (
        Towers,
        {"vision.blocks": "replicate"},
        "conditional: vision.blocks is a ModuleList, which has no forward: name the modules in it "
        "(vision.blocks.*), or use root",
    ),
    (
        Towers,
        {"last": "always"},
        "conditional: last: always needs a dummy forward: give Linear a method "
        "dummy_forward(self), which returns self(zeros), or use parallelize(..., "
        "conditional={name: parallel2d.Always(dummy=function)})",
    ),
    (
        Towers,
        {"blocks.0.up": Always(lambda module: module(torch.zeros(1, DIM)))},
        "conditional: blocks.0.up is inside blocks.0, whose parameters are gathered together; "
        "always supports modules between such groups only: use root or replicate",
    ),
    (
        Towers,
        {"vision": Always(before="block.0")},
        "conditional: vision: before=block.0 is not a module; near: blocks.0",
    ),
    (
        Tied,
        {"vision": "replicate"},
        "conditional: last.weight is also a parameter of vision, and modules outside of it need "
        "it on all ranks: use root",
    ),
]


def test_unsupported_settings_are_refused_by_name(ranks):
    [found] = ranks.run(1, refusals)
    for message, (_, _, expected) in zip(found, REFUSED, strict=True):
        assert message.startswith(expected)
