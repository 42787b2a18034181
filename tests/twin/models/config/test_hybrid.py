"""Attention that alternates with recurrent mixers: parameters to the unit, states, and what contradicts."""

import pytest

from tests.twin.models.config.counted import Counted, cached, counted, kept, one, spec, total
from twin.errors import BadFile
from twin.models.mixers import Attention, GatedDeltaNet, LightningAttention, ShortConvolution, conv_elements


@pytest.mark.parametrize("row", counted("hybrid"), ids=lambda row: row.name)
def test_parameters_are_those_of_the_class(row: Counted) -> None:
    assert total(row.config) == row.parameters


@pytest.mark.parametrize("row", cached("hybrid"), ids=lambda row: row.name)
def test_each_layer_keeps_what_that_of_the_class_does(row: Counted) -> None:
    assert kept(row.config) == row.cache


def test_every_fourth_layer_keeps_a_cache_and_the_others_a_state() -> None:
    model = spec(one("hybrid", "qwen3next"))
    (mixer, count), *others = model.states.items()
    assert isinstance(mixer, GatedDeltaNet)
    assert not others
    assert (count, mixer.state_elements, conv_elements(mixer)) == (6, 6 * 12 * 12, (2 * 2 + 6) * 12 * 3)
    assert isinstance(model.attention, Attention)
    assert (model.attention_layers, model.attention.kv_elements, model.attention.output_gate) == (2, 2 * 2 * 24, True)


def test_a_lightning_layer_keeps_a_state_a_head_and_no_tail() -> None:
    (mixer, count), *_ = spec(one("hybrid", "minimax")).states.items()
    assert isinstance(mixer, LightningAttention)
    assert (count, mixer.state_elements, conv_elements(mixer)) == (2, 4 * 24 * 24, 0)


def test_a_short_convolution_keeps_its_tail_alone() -> None:
    (mixer, count), *_ = spec(one("hybrid", "lfm2")).states.items()
    assert isinstance(mixer, ShortConvolution)
    assert (count, mixer.state_elements, conv_elements(mixer)) == (3, 0, 2 * 64)


def test_minimax_names_its_layers_by_a_word_or_a_digit() -> None:
    words = one("hybrid", "minimax")
    digits = one("hybrid", "minimax", layer_types=None, attn_type_list=[0, 1, 0, 1])
    assert spec(words).layer_kinds == spec(digits).layer_kinds


def test_a_head_for_one_more_token_attends_fully() -> None:
    text = one("hybrid", "qwen35moe")["text_config"]
    model = spec(text | {"mtp_num_hidden_layers": 1})
    layer = model.kinds["full"]
    assert model.towers == {"mtp": sum(layer.parameters(64).values()) + 2 * 64 * 64 + 3 * 64}
    own = spec(text | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True})
    assert own.towers["mtp"] - model.towers["mtp"] == 64 * 1000


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "qwen3next",
            {"layer_types": ["full_attention"] * 8},
            "layer_types .* and full_attention_interval 4 contradict",
        ),
        ("qwen3next", {"layer_types": ["full_attention"] * 7}, "layer_types .* and num_hidden_layers 8 contradict"),
        ("qwen3next", {"layer_types": ["odd"] * 8}, "layer_types: has 'odd', which is not known"),
        ("qwen3next", {"linear_value_head_dim": 6}, "linear_value_head_dim: is not linear_key_head_dim 12"),
        ("qwen3next", {"linear_num_value_heads": 5}, "linear_num_value_heads 5 and linear_num_key_heads 2 contradict"),
        ("qwen3next", {"attn_output_gate": False}, "attn_output_gate: is false"),
        ("minimax", {"shared_intermediate_size": 8}, "shared_intermediate_size: is not 0"),
        ("minimax", {"attn_type_list": [0, 1]}, "attn_type_list .* and num_hidden_layers 4 contradict"),
        ("lfm2", {"full_attn_idxs": [0]}, "layer_types .* and full_attn_idxs .* contradict"),
        ("lfm2", {"conv_dim": 32}, "conv_dim: is not hidden_size 64"),
        ("lfm2", {"layer_types": None}, "full_attn_idxs is missing"),
        ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu: is false"),
    ],
)
def test_what_contradicts_is_refused_by_name(name: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadFile, match=said):
        spec(one("hybrid", name, **changes))
