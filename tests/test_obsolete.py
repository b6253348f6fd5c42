"""Options of other frameworks get an answer instead of a TypeError or a bare "unknown key"."""

from __future__ import annotations

import re

import pytest
from torch import nn

from parallel2d import ConfigError, ParallelConfig, parallelize
from parallel2d.config import STRATEGIES, TrainConfig
from parallel2d.config.composition import compose
from parallel2d.config.other_frameworks import OPTIONS, STRATEGY_VALUES, answer, strategy_answer
from parallel2d.train import main

EXPECTED = {
    "limit_all_gathers", "use_orig_params", "backward_prefetch", "forward_prefetch", "sync_module_states", "param_init_fn", "device_id",
    "auto_wrap_policy", "mixed_precision", "sharding_strategy", "ignored_modules", "ignored_states", "process_group", "state_dict_type",
    "bucketing_strategy", "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb",
    "activation_checkpointing_policy", "data_parallel_shard_degree", "data_parallel_replicate_degree", "tensor_parallel_degree",
    "fsdp_reshard_after_forward",
}  # fmt: skip


def test_the_table_knows_the_options_people_bring():
    assert set(OPTIONS) >= EXPECTED


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_in_code_is_answered(name):
    says = re.escape(f"{name} is an option of {OPTIONS[name].source}: {OPTIONS[name].answer}")
    with pytest.raises(ConfigError, match=says):
        ParallelConfig(**{name: True})
    with pytest.raises(ConfigError, match=says):
        parallelize(nn.Linear(2, 2), None, **{name: True})


def test_every_option_on_the_command_line_is_answered():
    """The words are tried on the real schema, by the function that explains them."""
    from parallel2d.config.composition import register
    from parallel2d.config.explanation import explain

    register()
    told = explain([f"{name}=true" for name in OPTIONS], ValueError("unused")).splitlines()
    assert told == [
        f"unknown key {name} (given as {name}=true): {answer(name)}" for name in OPTIONS
    ]


def test_the_command_says_it_once_and_ends(capsys):
    assert (
        main(
            [
                "limit_all_gathers=true",
                "parallelism.tensor_parallel_degree=2",
                "strategy=HYBRID_SHARD",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert "limit_all_gathers is an option of FullyShardedDataParallel" in said
    assert "parallelism.tensor_parallel_degree is an option of torchtitan: mesh.tensor" in said
    assert "strategy=HYBRID_SHARD is strategy=hybrid here" in said


def test_a_key_that_was_added_with_plus_is_answered_too(capsys, tmp_path):
    assert main(["+use_orig_params=true", f"hydra.run.dir={tmp_path}"]) == 2
    assert "use_orig_params is an option of FullyShardedDataParallel" in capsys.readouterr().err


def keys_of(config, prefix=""):
    for name, value in vars(config).items():
        yield prefix + name
        if hasattr(value, "__dataclass_fields__"):
            yield from keys_of(value, f"{prefix}{name}.")


def test_no_answer_shadows_an_option_that_exists():
    keys = list(keys_of(TrainConfig()))
    # Sections of sections are no options: cluster.device.
    options = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    existing = {key.rpartition(".")[2] for key in options} | set(vars(ParallelConfig()))
    assert not existing & set(OPTIONS)


def test_answers_name_keys_that_exist():
    keys = set(keys_of(TrainConfig()))
    groups = {key for key in keys if "." not in key}
    for option in OPTIONS.values():
        for word in re.findall(r"\b((?:[a-z_]+\.)+[a-z_]+)\b", option.answer):
            first, _, rest = word.partition(".")
            if first == "parallel2d":
                import parallel2d

                assert rest in parallel2d.__all__, word
            elif first in groups:
                assert word in keys, word


@pytest.mark.parametrize(("theirs", "ours"), STRATEGY_VALUES.items())
def test_a_strategy_by_another_name_is_answered(theirs, ours):
    assert ours in STRATEGIES
    with pytest.raises(ConfigError, match=f"strategy={ours} here"):
        ParallelConfig(strategy=theirs.upper())
    assert (
        strategy_answer(f"ShardingStrategy.{theirs.upper()}")
        == f"strategy=ShardingStrategy.{theirs.upper()} is strategy={ours} here"
    )


def test_a_mistyped_option_gets_the_nearest():
    with pytest.raises(
        ConfigError, match="ParallelConfig has no option precison; did you mean precision?"
    ):
        ParallelConfig(precison="bf16")
    with pytest.raises(ConfigError, match="parallelize has no option sed; did you mean seed?"):
        parallelize(nn.Linear(2, 2), None, sed=1)


def test_offloading_in_the_words_of_others_is_refused():
    with pytest.raises(ConfigError, match="cpu_offload=.* must be True or False"):
        ParallelConfig(cpu_offload={"offload_params": True})


def test_words_that_exist_are_left_alone():
    assert compose(["optimizer.lr=0.5"]).config.optimizer.lr == 0.5
    assert ParallelConfig("zero3", precision="bf16").precision.name == "bf16"
