"""Configuration files: what they may hold, and the message for each mistake in one."""

from __future__ import annotations

import enum
import typing

import pytest
import torch
from cli_testing import TINY, write_config

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.config import load_config
from combined_1f1b.training.distributed import flatten, parallel_sizes
from combined_1f1b.training.megatron_config import build_transformer_config
from combined_1f1b.training.model import check_implementation
from combined_1f1b.training.plans import moe_layers_of
from combined_1f1b.training.values import checked

pytestmark = pytest.mark.world_size(1)


def load(tmp_path, *overrides, text=TINY):
    return load_config(write_config(tmp_path, text), overrides)


def test_overrides_win_and_are_parsed_as_yaml(tmp_path):
    config = load(tmp_path, "data.num_microbatches=8", "optimizer.lr=1e-4", "model.moe_layer_freq=[1,0]", "output=here")
    assert config.data.num_microbatches == 8
    assert config.optimizer.lr == 1e-4
    assert config.model["moe_layer_freq"] == [1, 0]
    assert config.output == "here"


def test_names_of_megatron_and_of_gptmodel_share_a_section(tmp_path):
    config = load(tmp_path, "model.vocab_size=300", "model.params_dtype=float32", "model.activation_func=silu")
    assert config.gpt.vocab_size == 300
    assert "vocab_size" not in config.model
    assert config.model["params_dtype"] is torch.float32
    assert config.model["activation_func"] is torch.nn.functional.silu


def test_the_output_folder_is_named_after_the_file(tmp_path):
    assert load(tmp_path).output == "runs/config"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.num_layer=4", ["model.num_layer:", "did you mean model.num_layers?"]),
        ("data.sequence_lenght=4", ["data.sequence_lenght:", "did you mean data.sequence_length?"]),
        ("optimiser.lr=1", ["optimiser:", "did you mean optimizer?"]),
        ("num_layers=4", ["num_layers:", "did you mean model.num_layers?"]),
        ("vocab_size=4", ["did you mean model.vocab_size?"]),
        ("train_iters=4", ["did you mean training.train_iters?"]),
        ("overlap.pair_head=true", ["overlap.pair_head:", "did you mean overlap.pair_head_and_tail?"]),
        ("optimizer.zzz=1", ["optimizer.zzz: unknown key", "known keys:", "adam_beta1"]),
        ("training.train_iters=many", ["training.train_iters='many'", "a whole number"]),
        ("training.train_iters=1.5", ["training.train_iters=1.5", "a whole number"]),
        ("training.train_iters=true", ["training.train_iters=True", "a whole number"]),
        ("training.train_iters=null", ["training.train_iters=None", "a whole number"]),
        ("training.tensorboard=1", ["training.tensorboard=1", "true or false"]),
        ("model.hidden_size=[1]", ["model.hidden_size=[1]", "a whole number"]),
        ("model.bf16=maybe", ["model.bf16='maybe'", "true or false"]),
        ("model.moe_token_dispatcher_type=ring", ["model.moe_token_dispatcher_type='ring'", "alltoall"]),
        ("model.params_dtype=bf17", ["model.params_dtype='bf17'", "bfloat16"]),
        ("model.activation_func=sine", ["model.activation_func='sine'", "gelu"]),
        ("model.no_sync_func=f", ["model.no_sync_func='f'", "takes a function"]),
        ("optimizer.optimizer=lion", ["optimizer.optimizer='lion'", "adamw, sgd"]),
        ("data.text=3", ["data.text=3", "a text or a list of a text or null"]),
        ("data=3", ["data=3", "must be a section"]),
        ("data.num_microbatches=0", ["data.num_microbatches=0", "at least 1"]),
        ("distributed.timeout_seconds=0", ["distributed.timeout_seconds=0", "at least 1"]),
        ("optimizer.clip_grad=-1", ["optimizer.clip_grad=-1.0", "at least 0"]),
        ("model.max_sequence_length=8", ["model.max_sequence_length=8", "shorter than data.sequence_length"]),
        ("nonsense", ["'nonsense': not an override", "key=value"]),
        ("=3", ["'=3': not an override"]),
        ("data.text=${nowhere}", ["nowhere"]),
        ("training.seed=???", ["training.seed"]),
    ],
)
def test_a_mistake_is_named_with_its_fix(tmp_path, override, parts):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, override)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: [", "not valid YAML at line"),
        ("- a list", "not a mapping of sections"),
        ("", "model.num_layers: missing"),
        ("model:\n  num_layers: 2\n", "model.hidden_size: missing"),
        (TINY + "  text: somewhere\n  megatron_dataset: too\n".replace("  ", "# "), ""),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, part):
    if not part:
        load(tmp_path, text=text)  # comments are fine
        return
    with pytest.raises(ConfigError, match=part):
        load(tmp_path, text=text)


def test_a_folder_is_not_a_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_two_kinds_of_data_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep one of the two"):
        load(tmp_path, "data.text=a", "data.megatron_dataset=b")


class Colour(enum.Enum):
    red = 1
    blue = 2


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, float, 3.0),
        (3, int | float, 3),
        (None, int | None, None),
        ([1, 2], list[int], [1, 2]),
        ([1, 2], tuple[int, int], (1, 2)),
        ("red", Colour, Colour.red),
        ("a", typing.Literal["a", "b"], "a"),
        ([1, 2], typing.Any, [1, 2]),
        ([1], int | list[int], [1]),
    ],
)
def test_values_become_what_the_type_wants(value, annotation, expected):
    result = checked("key", value, annotation)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "words"),
    [
        (True, int, "a whole number"),
        (1, bool, "true or false"),
        ("1", int, "a whole number"),
        ([1, "a"], list[int], "a list of a whole number"),
        ([1], tuple[int, int], "a list of"),
        ("green", Colour, "one of red, blue"),
        ("c", typing.Literal["a", "b"], "one of a, b"),
        (1, typing.Literal["a", 2], "one of a, 2"),
        (None, int, "a whole number"),
    ],
)
def test_other_types_are_refused_in_words(value, annotation, words):
    with pytest.raises(ConfigError, match=f"key=.*must be {words}"):
        checked("key", value, annotation)


def test_megatron_refuses_in_one_line(tmp_path):
    overrides = ("model.num_attention_heads=3", "model.tensor_model_parallel_size=2")
    config = load(tmp_path, "model.overlap_moe_expert_parallel_comm=false", *overrides)
    with pytest.raises(ConfigError, match="model: Megatron refuses this combination") as error:
        build_transformer_config(config.model)
    assert "\n" not in str(error.value)


def test_a_field_of_latent_attention_needs_latent_attention(tmp_path):
    config = load(tmp_path, "model.q_lora_rank=8")
    with pytest.raises(ConfigError, match="multi_latent_attention=true"):
        build_transformer_config(config.model)


def test_sixteen_bits_fill_in_the_number_formats(tmp_path):
    config = load(tmp_path, "model.overlap_moe_expert_parallel_comm=false", "model.expert_model_parallel_size=1")
    built = build_transformer_config(config.model)
    assert built.params_dtype is torch.bfloat16
    assert built.transformer_impl == "local"


def test_transformer_engine_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr("combined_1f1b.training.model.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Transformer Engine is not installed"):
        check_implementation(load(tmp_path, "model.transformer_impl=transformer_engine"))


@pytest.mark.parametrize(
    ("overrides", "world", "parts"),
    [
        ([], 1, ["model.expert_model_parallel_size=2", "1 rank ", "torchrun --nproc-per-node 2"]),
        ([], 3, ["model.expert_model_parallel_size=2", "3 ranks"]),
        (["model.num_moe_experts=3"], 2, ["model.expert_model_parallel_size=2", "num_moe_experts=3"]),
        (["model.num_moe_experts=null"], 2, ["the model has no experts"]),
        (["model.tensor_model_parallel_size=4"], 2, ["model.tensor_model_parallel_size=4", "2 ranks"]),
        (["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"], 2, ["tensor x pipeline = 4"]),
        (["model.pipeline_model_parallel_size=2"], 2, ["expert x expert tensor x pipeline = 4"]),
        (["model.context_parallel_size=2"], 2, ["model.context_parallel_size=2", "does not split sequences"]),
        (["model.expert_model_parallel_size=0"], 2, ["model.expert_model_parallel_size=0"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path, overrides, world, parts):
    with pytest.raises(ConfigError) as error:
        parallel_sizes(load(tmp_path, *overrides), world)
    for part in parts:
        assert part in str(error.value)


def test_sizes_that_fit(tmp_path):
    sizes = parallel_sizes(load(tmp_path, "model.tensor_model_parallel_size=2"), 8)
    assert (sizes.data, sizes.expert_tensor) == (4, 2)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"num_layers": 4, "num_moe_experts": 2}, (0, 1, 2, 3)),
        ({"num_layers": 4, "num_moe_experts": 2, "moe_layer_freq": 2}, (0, 2)),
        ({"num_layers": 3, "num_moe_experts": 2, "moe_layer_freq": [0, 1, 1]}, (1, 2)),
        ({"num_layers": 3}, ()),
    ],
)
def test_layers_with_experts_are_megatrons(model, expected):
    assert moe_layers_of(model) == expected


def test_a_layer_pattern_has_one_entry_a_layer():
    with pytest.raises(ConfigError, match="give it 3 entries"):
        moe_layers_of({"num_layers": 3, "num_moe_experts": 2, "moe_layer_freq": [1, 0]})


def test_every_setting_has_a_dotted_name(tmp_path):
    settings = flatten(load(tmp_path))
    assert settings["model.num_layers"] == "2"
    assert settings["model.vocab_size"] == "256"
    assert settings["data.num_microbatches"] == "3"
