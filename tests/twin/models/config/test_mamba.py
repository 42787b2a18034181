"""Mamba alone, between attention and beside it: parameters to the unit, states, and what contradicts."""

import pytest

from tests.twin.models.config.counted import Counted, cached, counted, kept, one, spec, total
from twin.errors import BadFile
from twin.models.mixers import Mamba, Mamba2, conv_elements


@pytest.mark.parametrize("row", counted("mamba"), ids=lambda row: row.name)
def test_parameters_are_those_of_the_class(row: Counted) -> None:
    assert total(row.config) == row.parameters


@pytest.mark.parametrize("row", cached("mamba"), ids=lambda row: row.name)
def test_each_layer_keeps_what_that_of_the_class_does(row: Counted) -> None:
    assert kept(row.config) == row.cache


def test_mamba_keeps_states_of_each_channel_and_a_tail() -> None:
    model = spec(one("mamba", "mamba"))
    (mixer, count), *_ = model.states.items()
    assert isinstance(mixer, Mamba)
    assert (count, mixer.state_elements, conv_elements(mixer)) == (3, 128 * 12, 128 * 3)
    assert model.attention is None


def test_mamba2_keeps_states_of_each_channel_and_a_tail_with_b_and_c() -> None:
    (mixer, count), *_ = spec(one("mamba", "nemotron_h")).states.items()
    assert isinstance(mixer, Mamba2)
    assert (count, mixer.state_elements, conv_elements(mixer)) == (3, 8 * 10 * 12, (80 + 2 * 2 * 12) * 3)


def test_attention_and_mamba_side_by_side_keep_both() -> None:
    model = spec(one("mamba", "falconh1"))
    assert (model.attention_layers, sum(model.states.values())) == (3, 3)


def test_a_layer_may_be_a_feed_forward_alone() -> None:
    model = spec(one("mamba", "nemotron_h"))
    assert [bool(model.kinds[kind].mixers) for kind in model.layer_kinds] == [letter in "M*" for letter in "M-M*-ME-"]


def test_layers_by_letters_or_by_words() -> None:
    words = ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "moe", "mlp"]
    listed = one("mamba", "nemotron_h", hybrid_override_pattern=None, layers_block_type=words)
    assert spec(listed).layer_kinds == spec(one("mamba", "nemotron_h")).layer_kinds


def test_experts_may_work_in_a_narrower_space() -> None:
    wide, narrow = spec(one("mamba", "nem_latent", moe_latent_size=None)), spec(one("mamba", "nem_latent"))
    assert wide.parameters["experts"] / narrow.parameters["experts"] == 64 / 20
    assert narrow.parameters["feed_forward"] - wide.parameters["feed_forward"] == 2 * 64 * 20


def test_a_head_for_one_more_token_has_layers_of_its_own_pattern() -> None:
    model = spec(one("mamba", "nem_latent"))
    attention, experts = (sum(model.kinds[kind].parameters(64).values()) for kind in ("full", "moe"))
    assert model.towers == {"mtp": attention + experts + 2 * 64 * 64 + 3 * 64}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("nemotron_h", {"num_hidden_layers": 7}, "hybrid_override_pattern 'M.*' and num_hidden_layers 7 contradict"),
        ("nemotron_h", {"hybrid_override_pattern": "M?"}, r"hybrid_override_pattern: has '\?', which is not known"),
        ("nemotron_h", {"layers_block_type": ["odd"]}, "layers_block_type: has 'odd', which is not known"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias: is true"),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads 8 and n_groups 3 contradict"),
        ("granite4", {"layer_types": ["mamba"]}, "layer_types .* and num_hidden_layers 4 contradict"),
        ("granite4", {"mamba_d_head": 8}, "mamba_n_heads 8 and mamba_d_head 8 contradict"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset 8 and attn_layer_period 8 contradict"),
    ],
)
def test_what_contradicts_is_refused_by_name(name: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadFile, match=said):
        spec(one("mamba", name, **changes))
