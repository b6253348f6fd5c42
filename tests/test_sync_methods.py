"""Communication over the replicate axis by every method equals a plain reference in one process,
in fp64.
"""

import functools
import importlib
import multiprocessing
import re

import numpy as np
import pytest
import sync_runs
import torch
import torch.distributed as dist
from training import largest_difference, weights_of

import parallel2d
from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.sync.ema import EMAWeights
from parallel2d.parallel.sync.formats import fused_quantize
from parallel2d.parallel.sync.formats.quantize import (
    BlockFormat,
    BlockNoise,
    Piece,
    key_of,
    mean_of,
    to_blocks,
)
from parallel2d.parallel.sync.methods.outer_parameter import OuterParameter
from parallel2d.parallel.sync.updates import outer_sync, replicated_tensors

TWO_BY_TWO = {"replicate": 2, "shard": 2}
DILOCO = {"name": "diloco", "every": 5}
METHODS = {
    "fp32": ("hybrid", {}),
    "bf16": ("hybrid", {"wire": "bf16"}),
    # A bucket for each group: more than are in flight
    "int8": ("hybrid", {"wire": "int8", "bucket_mib": 0.001}),
    "int4": ("hybrid", {"wire": "int4", "warmup": 1, "bucket_mib": 0.001}),
    "split": ("hybrid_full", {}),
    "split_bf16": ("hybrid_full", {"wire": "bf16"}),
    "split_int8": ("hybrid_full", {"wire": "int8"}),
    "split_int4": ("hybrid_full", {"wire": "int4", "warmup": 1, "bucket_mib": 0.001}),
    "diloco": ("hybrid", DILOCO),
    "diloco_bf16": ("hybrid", {**DILOCO, "wire": "bf16"}),
    "diloco_int8": ("hybrid", {**DILOCO, "wire": "int8"}),
    "diloco_int4": ("hybrid", {**DILOCO, "wire": "int4"}),
    "late": ("hybrid", {**DILOCO, "delay": 2}),
    "mixed": (
        "hybrid",
        {**DILOCO, "delay": 1, "mix": 0.25, "outer_lr": 0.5, "outer_momentum": 0.3},
    ),
    "fragments": ("hybrid", {**DILOCO, "every": 6, "fragments": 3}),
    "in_flight": ("hybrid", {**DILOCO, "wire": "int4", "fragments": 3, "delay": 3}),
}
# Their models have parameters without dimensions, which the agreement of a step reduces exactly;
# diloco shares them like the others.
SCALAR = ("fp32", "int8", "split", "diloco")
# Where four replicas do something else than two
OF_FOUR = ("int8", "int4", "split", "split_int4", "diloco", "diloco_int4")


def check_method(ranks, name, replicas, shards):
    strategy, sync = METHODS[name]
    steps = 12 if "name" in sync else 5
    sizes = {"replicate": replicas, "shard": shards}
    scalar = name in SCALAR
    word = "ddp" if shards == 1 and strategy == "hybrid" else strategy
    found = ranks.run(4, sync_runs.run, sizes, word, sync, steps=steps, scalar=scalar)
    begins = found[0]["begins"]
    if "name" in sync:
        every, fragments = sync["every"], sync.get("fragments", 1)
        assert set(begins.values()) == {part * every // fragments for part in range(fragments)}
    options = {"steps": steps, "shards": shards, "scalar": scalar, "begins": begins}
    expected = sync_runs.reference(strategy, sync, replicas, **options)
    assert largest_difference(found[0]["parameters"], expected) < 1e-10


@pytest.mark.parametrize(
    "name",
    [
        *("bf16", "int8", "int4", "split_int4", "diloco", "diloco_int4", "in_flight"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fp32", "split", "late", "mixed", "fragments")
        ),
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("split_bf16", "split_int8", "diloco_bf16", "diloco_int8")
        ),
    ],
)
def test_every_method_equals_its_reference(ranks, name):
    check_method(ranks, name, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_replicas_equal_their_reference(ranks, name):
    check_method(ranks, name, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [("int8", "reduce_scatter_only"), ("diloco", "none")])
def test_accumulation_keeps_losses_and_weights(ranks, name, mode):
    run = functools.partial(ranks.run, 4, sync_runs.run, TWO_BY_TWO, *METHODS[name], steps=6)
    once, twice = run()[0], run(accumulation=2, mode=mode)[0]
    # A sum that is rounded differently by 1e-16 may fall to another code, one in some thousand.
    bound = 1e-10 if name == "diloco" else 1e-3
    assert largest_difference(once["parameters"], twice["parameters"]) < bound


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "split_int4", "in_flight"])
def test_resumed_run_equals_the_uninterrupted_run_bitwise(ranks, tmp_path, name):
    case, folder = (TWO_BY_TWO, *METHODS[name]), str(tmp_path)
    whole = ranks.run(4, sync_runs.run, *case, steps=11)
    # In the middle of a period of five, and with fragments on their way.
    ranks.run(4, sync_runs.run, *case, steps=7, folder=folder, save_after=[3, 7])
    resumed = ranks.run(4, sync_runs.run, *case, steps=11, folder=folder, resume="auto")
    assert largest_difference(resumed[0]["parameters"], whole[0]["parameters"]) == 0.0


LAYOUTS = [
    (TWO_BY_TWO, "hybrid", {}),
    (TWO_BY_TWO, "hybrid_full", {}),
    ({"replicate": 1, "shard": 4}, "zero3", {}),
    (TWO_BY_TWO, "hybrid", DILOCO),
]


@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2)),
        *(pytest.param(each, marks=pytest.mark.soak) for each in (0, 3)),
    ],
)
def test_every_layout_resumes_from_another(ranks, tmp_path, number):
    """Each once as source and once as target."""
    source, target = LAYOUTS[number - 1], LAYOUTS[number]
    folder = str(tmp_path)
    saved = ranks.run(4, sync_runs.run, *source, steps=5, folder=folder, save_after=[5])
    loaded = ranks.run(4, sync_runs.run, *target, steps=5, folder=folder, resume="auto")
    assert largest_difference(loaded[0]["parameters"], saved[0]["parameters"]) == 0.0
    # Layouts that reduce gradients exactly continue equally, with the state of the optimizer.
    if DILOCO not in (source[2], target[2]):
        on = ranks.run(4, sync_runs.run, *target, steps=7, folder=folder, resume="auto")
        expected = ranks.run(4, sync_runs.run, *source, steps=7)
        assert largest_difference(on[0]["parameters"], expected[0]["parameters"]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "split_int4", "diloco_int4"])
def test_replicas_fail_and_rejoin_between_outer_steps(ranks, tmp_path, name):
    """Two replicas after four, and four after two: the shared parameters are kept, the error
    feedback keeps its mean over the replicas, and training continues.
    """
    strategy, sync = METHODS[name]
    word = "ddp" if strategy == "hybrid" else strategy
    four, two = {"replicate": 4, "shard": 1}, {"replicate": 2, "shard": 1}
    again = {"folder": str(tmp_path), "resume": "auto"}
    saved = ranks.run(
        4, sync_runs.run, four, word, sync, steps=7, folder=str(tmp_path), save_after=[7]
    )
    unsent = [run["residual"] for run in saved]
    same = ranks.run(4, sync_runs.run, four, word, sync, steps=7, **again)
    for run, rest in zip(same, unsent, strict=True):
        assert largest_difference(run["residual"], rest) == 0.0
    shrunk = ranks.run(2, sync_runs.run, two, word, sync, steps=7, **again)
    mean = {name: sum(each[name] for each in unsent) / 4 for name in unsent[0]}
    most = max(float(np.abs(value).max()) for value in mean.values())
    assert most > 0.0
    for run in shrunk:
        assert largest_difference(run["parameters"], saved[0]["parameters"]) == 0.0
        # The error feedback of gradients is stored in 8 bits.
        assert largest_difference(run["residual"], mean) < (1e-15 if "name" in sync else most / 100)
    for size, sizes in ((2, two), (4, four)):
        on = ranks.run(size, sync_runs.run, sizes, word, sync, steps=10, **again)
        assert largest_difference(on[0]["parameters"], saved[0]["parameters"]) > 0.0


def _flip_one_bit(cases, rank):
    """Trains with the trainer's comparison; one bit of one parameter of one replica changes on the way."""
    said = []
    for strategy, sync in cases:
        mesh = parallel2d.build_mesh(parallel2d.MeshSpec(**TWO_BY_TWO), strategy)
        config = parallel2d.ParallelConfig(strategy, sync=SyncConfig(**sync))
        model = parallel2d.parallelize(sync_runs.small_model().float(), mesh, config)
        parallel2d.attach_optimizer(model, sync_runs.adamw(parallel2d.updated_parameters(model)))
        parallel2d.compare_replicas(model, mesh)
        if dist.get_rank() == rank:
            tensor = replicated_tensors(model)["1"]["1.up.weight"]
            tensor.detach().to_local().view(-1).view(torch.int32)[7] ^= 1 << 3
        with pytest.raises(ConfigError) as error:
            parallel2d.compare_replicas(model, mesh)
        said.append(str(error.value))
    return said


def test_one_flipped_bit_of_a_replica_is_named(ranks):
    cases = [("hybrid", {}), ("hybrid_full", {}), ("hybrid", DILOCO)]
    for said in ranks.run(4, _flip_one_bit, cases, 3):
        assert len(said) == 3
        assert all("1.up.weight differs between ranks [1] and [3]" in each for each in said)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_quantizers_keep_non_finite_values_in_place(value):
    values = torch.randn(700, generator=torch.Generator().manual_seed(1))
    values[300] = value
    for bits in (8, 4):
        noise = BlockNoise([Piece(3, 0)], [700], values.device)
        blocks, code = to_blocks([values]), BlockFormat(bits)
        back = code.dequantize(
            code.quantize(blocks, noise.numbers(0, len(blocks), 0)), values.dtype
        )
        found = back.view(-1)[:700]
        assert (~found.isfinite()).nonzero().flatten().tolist() == [300]
        assert str(found[300].item()) == str(value)


def _blocks(count):
    """Blocks of very different scales, with zeros and numbers that are not finite."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(256 * count - 9, generator=generator)
    values *= 10.0 ** torch.randint(-6, 6, values.shape, generator=generator)
    values[5], values[20], values[21] = float("nan"), float("inf"), -float("inf")
    values[256:512] = 0.0
    return to_blocks([values])


def _bits_of(values):
    return values.nan_to_num(nan=0.5).view(torch.int32), values.isnan()


def _compare_kernels(bits):
    blocks, code, stage = _blocks(7), BlockFormat(bits), key_of("stage")
    noise = BlockNoise([Piece(key_of("a"), 2**31 - 600)], [256 * 7 - 9], blocks.device)
    quantize, dequantize = fused_quantize.quantize_by_kernel, fused_quantize.dequantize_by_kernel
    # The last two are padding.
    padded = torch.nn.functional.pad(blocks[3:], (0, 0, 0, 2))
    expected = code.quantize(padded, noise.numbers(3, 9, stage))
    assert torch.equal(quantize(padded, noise.places, 3, stage, bits), expected)
    nearest = code.quantize(blocks, 0.5)
    assert torch.equal(quantize(blocks, None, 0, 0, bits), nearest)
    # As parts of longer messages
    messages = torch.zeros(3, 8, code.row_bytes, dtype=torch.uint8)
    messages[:, 1:] = torch.stack([nearest, code.quantize(blocks.flip(0), 0.5), nearest])
    for replicas in (1, 2, 3):
        sent = messages[:replicas, 1:]
        mean = mean_of([code.dequantize(each, torch.float32) for each in sent])
        for found, wanted in zip(_bits_of(dequantize(sent, bits)), _bits_of(mean), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_gpu_kernels_equal_the_operators_bitwise(bits, monkeypatch):
    pytest.importorskip("triton")
    # Triton's interpreter runs them on the CPU in a process that begins with this variable.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    process = multiprocessing.get_context("spawn").Process(target=_compare_kernels, args=(bits,))
    process.start()
    process.join()
    assert process.exitcode == 0


def _machine_code(kernel, types, constants):
    source = pytest.importorskip("triton.compiler").ASTSource(kernel, types, constants)
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    options = {"num_warps": 2, "enable_fp_fusion": False}
    return importlib.import_module("triton").compile(source, target=target, options=options).asm


@pytest.mark.parametrize("bits", [8, 4])
def test_kernels_for_gpus_compile_to_exact_divisions_and_no_fused_products(bits):
    pytest.importorskip("triton")
    kernels = fused_quantize.kernels()
    numbers = dict.fromkeys(("first", "known", "stage"), "i32")
    pointers = {"values": "*fp32", "places": "*i32", "sent": "*u8", "scales": "*fp32"}
    kinds = dict.fromkeys(("rounds_at_random", "bits"), "constexpr")
    quantize = _machine_code(
        kernels.quantize, pointers | numbers | kinds, {"rounds_at_random": True, "bits": bits}
    )
    pointers = {"sent": "*u8", "scales": "*fp32", "values": "*fp32"}
    numbers = {"replicas": "i32", "replica_bytes": "i32"}
    types = pointers | numbers | {"bits": "constexpr"}
    for code in (quantize, _machine_code(kernels.dequantize_mean, types, {"bits": bits})):
        found = set(re.findall(r"\b(?:div|fma)\.[a-z.]*f32", code["ptx"]))
        assert found == {"div.rn.f32"}
        assert code["cubin"]


def test_random_rounding_is_unbiased_and_bounded_by_the_scale():
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    blocks = to_blocks([values])
    for bits, largest in ((8, 126), (4, 6)):
        code = BlockFormat(bits)
        scale = blocks.abs().amax(1, keepdim=True) / largest
        total = torch.zeros_like(blocks)
        for step in range(400):
            noise = BlockNoise([Piece(key_of(0, step, "w"), 0)], [1000], values.device)
            back = code.dequantize(code.quantize(blocks, noise.numbers(0, 4, 0)), torch.float64)
            assert ((back - blocks).abs() <= scale * (1 + 1e-6)).all()
            total += back
        # The mean of 400 numbers that are one scale apart at most: 4 standard deviations.
        assert ((total / 400 - blocks).abs() <= 4 * 0.5 / 20 * scale).all()


def _sharded_model(strategy, sync, frozen=()):
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(replicate=2, shard=1), strategy)
    config = parallel2d.ParallelConfig(strategy, precision="fp64", sync=SyncConfig(**sync))
    model = sync_runs.small_model()
    for number in frozen:
        model[number].requires_grad_(False)
    return parallel2d.parallelize(model, mesh, config)


def _trained_model(strategy, sync, steps=0, frozen=()):
    model = _sharded_model(strategy, sync, frozen)
    optimizer = sync_runs.adamw(parallel2d.updated_parameters(model))
    parallel2d.attach_optimizer(model, optimizer)
    for step in range(1, steps + 1):
        _step(model, optimizer, step)
    return model, optimizer


def _step(model, optimizer, step):
    inputs, targets = (part.chunk(2)[dist.get_rank()] for part in sync_runs.batch_of(step))
    sync_runs.loss_of(model, (inputs, targets)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _residuals_after(*events):
    """Return the error feedback after the third step and after each of ``events``, and the
    parameters, of a loop with int4 every step.
    """
    model, optimizer = _trained_model("ddp", METHODS["int4"][1], steps=3)
    found = [sync_runs.local_residuals(model)]
    for event in events:
        scale = 8.0 if event == "scaled step" else 1.0
        parallel2d.set_step(model, 4, scale)
        inputs, targets = (part.chunk(2)[dist.get_rank()] for part in sync_runs.batch_of(4))
        (scale * sync_runs.loss_of(model, (inputs, targets))).backward()
        if event.endswith("step"):
            for parameter in model.parameters():
                parameter.grad /= scale
            optimizer.step()
        if event != "kept":
            optimizer.zero_grad(set_to_none="zeroed" not in event)
        found.append(sync_runs.local_residuals(model))
    return found, weights_of(model)


def test_error_feedback_changes_only_with_an_update(ranks):
    stepped, updated = ranks.run(2, _residuals_after, "step")[0]
    assert largest_difference(*stepped) > 0.0
    for refusal in ("refused", "zeroed refused"):
        refused, after_all = ranks.run(2, _residuals_after, refusal, "step")[0]
        assert largest_difference(*refused[:2]) == 0.0
        assert largest_difference(refused[-1], stepped[-1]) == 0.0
        assert largest_difference(after_all, updated) == 0.0
    scaled, _ = ranks.run(2, _residuals_after, "scaled step")[0]
    assert largest_difference(scaled[-1], stepped[-1]) == 0.0
    # Zeros in place of gradients are not an earlier reduction.
    zeroed, dropped = (
        ranks.run(2, _residuals_after, each, "step")[0] for each in ("zeroed step", "step")
    )
    assert largest_difference(zeroed[0][-1], dropped[0][-1]) == 0.0
    # The second reduction of a step sends the gradients that are missing in the first.
    twice, _ = ranks.run(2, _residuals_after, "kept", "step")[0]
    assert largest_difference(*twice[:2]) == 0.0
    assert largest_difference(twice[-1], stepped[-1]) > 0.0


def _exports():
    """Return the state saved inside and outside of the context, and the replica's values before
    and after.
    """
    model, optimizer = _trained_model("ddp", {"name": "diloco", "every": 4}, steps=5)
    parallel2d.attach_optimizer(model, optimizer)
    _step(model, optimizer, 6)
    assert outer_sync(model).steps == 6, "attached twice it counts once"
    before = model[0].weight.full_tensor().clone()
    outside = parallel2d.full_state(model, rank0_only=False)["model"]["0.weight"].clone()
    with torch.no_grad():
        model(sync_runs.batch_of(1)[0])
    with parallel2d.outer_parameters(model), parallel2d.outer_parameters(model):
        inside = parallel2d.full_state(model, rank0_only=False)["model"]["0.weight"].clone()
        shown = model[0].weight.full_tensor().clone()
        with torch.no_grad():
            computed = model(sync_runs.batch_of(1)[0])
    plain = sync_runs.small_model()
    plain.load_state_dict(parallel2d.full_state(model, rank0_only=False)["model"])
    expected = plain(sync_runs.batch_of(1)[0])
    after = model[0].weight.full_tensor()
    equal = [torch.equal(outside, inside), torch.equal(outside, shown), torch.equal(before, after)]
    return equal, torch.equal(before, outside), (computed - expected).abs().max().item(), outside


def test_exports_and_validation_see_the_shared_parameters(ranks):
    answers = ranks.run(2, _exports)
    for equal, own_is_shared, difference, _ in answers:
        assert equal == [True, True, True]
        assert not own_is_shared
        assert difference < 1e-12
    assert torch.equal(answers[0][3], answers[1][3])


def _written(strategy, sync, how):
    """A value that was written to parameters, three steps later."""
    model, optimizer = _trained_model(strategy, sync, steps=3)
    if how == "loaded":
        state = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
        model.load_state_dict(state)
    else:
        for parameter in model.parameters():
            parameter.data.fill_(2.0)
    for step in range(3):
        _step(model, optimizer, 4 + step)
    with parallel2d.outer_parameters(model):
        return model[0].weight.full_tensor().mean().item()


@pytest.mark.parametrize(
    ("strategy", "sync", "how"),
    [
        ("hybrid_full", {"wire": "bf16"}, "loaded"),
        ("hybrid_full", {"wire": "bf16"}, "in place"),
        ("ddp", {"name": "diloco", "every": 2}, "loaded"),
    ],
    ids=str,
)
def test_values_written_to_parameters_are_kept(ranks, strategy, sync, how):
    for value in ranks.run(2, _written, strategy, sync, how):
        assert value == pytest.approx(2.0, abs=0.2)


def _states_around_averages(strategy, sync):
    """Return the state saved before, inside and after the context that swaps in the EMA weights;
    and the EMA weights.
    """
    model, optimizer = _trained_model(strategy, sync, steps=2)
    averages = EMAWeights(model)
    for step in range(3, 5):
        _step(model, optimizer, step)
        averages.update(0.5)
    states = [parallel2d.full_state(model)]
    with parallel2d.outer_parameters(model):
        states.append(parallel2d.full_state(model))
    states.append(parallel2d.full_state(model))
    average = averages.values["0.weight"].full_tensor()
    # Only rank 0 has states.
    return [each["model"]["0.weight"] for each in states if each], average


@pytest.mark.parametrize(
    ("strategy", "sync"),
    [("hybrid_full", {"wire": "bf16"}), ("ddp", {"name": "diloco", "every": 2})],
)
def test_ema_weights_are_saved_inside_their_context_and_change_no_state(ranks, strategy, sync):
    (before, inside, after), average = ranks.run(2, _states_around_averages, strategy, sync)[0]
    assert torch.equal(before, after)
    assert torch.equal(inside, average)
    assert not torch.equal(inside, before)


def _scaled_by_hand(how):
    """Return the distance of unrounded rows from their expected values: scaled in three steps that
    do nothing else, directly or through parameters.
    """
    model, optimizer = _trained_model("hybrid_full", {"wire": "bf16"}, steps=3)
    optimizer.param_groups[0].update(lr=0.0)
    owned = [each.detach().to_local() for each in parallel2d.updated_parameters(model)]
    expected = [rows.clone() for rows in owned]
    for step in range(4, 7):
        # Of the parameters rounded values are taken off.
        for rows in expected:
            rows.sub_((rows if how == "rows" else rows.bfloat16().double()) / 32)
        for each in owned if how == "rows" else model.parameters():
            each.data.mul_(31 / 32)
        if how == "parameters, saved":
            parallel2d.full_state(model)
        _step(model, optimizer, step)
    found, wanted = (torch.cat([rows.flatten() for rows in each]) for each in (owned, expected))
    return (found - wanted).abs().max().item()


@pytest.mark.parametrize("how", ["rows", "parameters", "parameters, saved"])
def test_rows_scaled_by_the_user_keep_their_rounding_error(ranks, how):
    assert max(ranks.run(2, _scaled_by_hand, how)) < 1e-12


def _dropped(strategy):
    """Return the norm of a batch after another batch was dropped before its reduction over the
    replicas.
    """
    model, optimizer = _trained_model(strategy, {})
    with parallel2d.no_sync(model):
        (1000 * sync_runs.loss_of(model, sync_runs.batch_of(1))).backward()
    optimizer.zero_grad()
    sync_runs.loss_of(model, sync_runs.batch_of(2)).backward()
    return parallel2d.clip_gradient_norm(model.parameters(), 1.0).item()


def test_zero_grad_drops_unreduced_gradients_also_with_split_updates(ranks):
    whole, split = ranks.run(2, _dropped, "ddp"), ranks.run(2, _dropped, "hybrid_full")
    assert split == pytest.approx(whole, rel=1e-12)


def _without_attaching(strategy, sync):
    model = _sharded_model(strategy, sync)
    sync_runs.loss_of(model, sync_runs.batch_of(1)).backward()


def _on_full_parameters(strategy, sync):
    model = _sharded_model(strategy, sync)
    parallel2d.attach_optimizer(model, sync_runs.adamw(model.parameters()))


def _full_in_a_later_group(strategy, sync):
    model, optimizer = _trained_model(strategy, sync)
    optimizer.add_param_group({"params": [next(model.parameters())]})
    _step(model, optimizer, 1)


def _penalty_apart(strategy, sync):
    model, optimizer = _trained_model(strategy, sync)
    sync_runs.loss_of(model, sync_runs.batch_of(1)).backward()
    sum(each.square().sum() for each in model.parameters()).backward()
    optimizer.step()


def _clipped_by_torch(strategy, sync):
    model, _ = _trained_model(strategy, sync, steps=1)
    torch.nn.utils.clip_grad_norm_(parallel2d.updated_parameters(model), 1.0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _clipped_by_torch_after_a_forward(strategy, sync):
    model, _ = _trained_model(strategy, sync, steps=1)
    sync_runs.loss_of(model, sync_runs.batch_of(1))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _stepped_in_no_sync(strategy, sync):
    model, optimizer = _trained_model(strategy, sync)
    with parallel2d.no_sync(model):
        _step(model, optimizer, 1)


def _unfrozen(strategy, sync):
    model, optimizer = _trained_model(strategy, sync, steps=1, frozen=[3])
    model[3].requires_grad_(True)
    _step(model, optimizer, 2)


def _looked_at_from_rank_0(strategy, sync):
    model, _ = _trained_model(strategy, sync, steps=2)
    with parallel2d.summon_full_params(model, rank0_only=True):
        pass


NOT_ATTACHED = r"pass it to parallel2d\.attach_optimizer"
UNFROZEN = r"3\.(weight|bias).*unfrozen after parallelize"


@pytest.mark.parametrize(("mistake", "strategy", "sync", "message"), [
    (_without_attaching, "hybrid_full", {}, NOT_ATTACHED),
    (_without_attaching, "ddp", {"name": "diloco"}, NOT_ATTACHED),
    (_without_attaching, "ddp", {"wire": "int4", "warmup": 0}, NOT_ATTACHED),
    (_without_attaching, "ddp", {"wire": "int4"},
        "a share of train.steps, which a custom loop does not have"),
    (_on_full_parameters, "hybrid_full", {}, r"parallel2d\.updated_parameters\(model\)"),
    (_full_in_a_later_group, "hybrid_full", {}, r"AdamW has model\.parameters\(\)"),
    (_penalty_apart, "hybrid_full", {}, "0.weight.*a gradient of a backward outside of the model's forwards"),
    (_clipped_by_torch, "hybrid_full", {}, r"clip_grad_norm_\(\) of model\.parameters\(\)"),
    (_clipped_by_torch_after_a_forward, "ddp", {}, r"clip_grad_norm_\(\) after a forward without backward"),
    (_stepped_in_no_sync, "ddp", {}, r"gradients from no_sync\(\) only"),
    (_unfrozen, "ddp", {"name": "diloco"}, UNFROZEN), (_unfrozen, "hybrid_full", {"wire": "bf16"}, UNFROZEN),
    # it would overwrite replicas that differ
    (_looked_at_from_rank_0, "ddp", {"name": "diloco"}, "use writeback=False"),
])  # fmt: skip
def test_a_mistake_in_a_loop_is_an_error(ranks, mistake, strategy, sync, message):
    with pytest.raises(AssertionError, match=message):
        ranks.run(2, mistake, strategy, sync)


def test_rounding_of_low_precision_parameters_is_not_a_change():
    parameter = OuterParameter("narrow", torch.nn.Parameter(torch.ones(3).bfloat16()), False)
    with torch.no_grad():
        parameter.outer += torch.tensor([1e-4, 0.3, -1e-3])
        parameter.take(0.0)
        assert not parameter.change().any()
        parameter.own -= 0.25
    assert parameter.change().tolist() == [0.25, 0.25, 0.25]
