"""Decoders with uneven layers: parameters to the unit, heads by layer, missing halves."""

from typing import Any

import pytest

from tests.twin.models.config.sums import name_of, row, rows_of, spec_of
from twin.errors import BadFile
from twin.models.config.uneven import READERS
from twin.models.mixers import Attention


@pytest.mark.parametrize(("config", "parameters"), rows_of(READERS), ids=name_of)
def test_parameters_are_those_of_the_class(config: dict[str, Any], parameters: int) -> None:
    assert sum(spec_of(config).parameters.values()) == parameters


def mixers(config: dict[str, Any], **changes: Any) -> list[Attention]:
    """The attention of each layer."""
    spec = spec_of(config, **changes)
    return [mixer for kind in spec.layer_kinds for mixer in spec.kinds[kind].mixers if isinstance(mixer, Attention)]


def test_windows_of_mimo_v2_have_kv_heads_of_their_own_number_and_values_of_their_own_width() -> None:
    config = row("MiMoV2FlashForCausalLM")
    layers = mixers(config, hybrid_layer_pattern=[0, 1, 1, 0, 1], swa_num_key_value_heads=4, sliding_window_size=32)
    assert [mixer.kv_heads for mixer in layers] == [2, 4, 4, 2, 4]
    assert [mixer.window for mixer in layers] == [0, 33, 33, 0, 33]  # 32 before the query
    assert {mixer.kv_elements // mixer.kv_heads for mixer in layers} == {24 + 16}


def test_query_heads_differ_by_layer() -> None:
    assert [mixer.query_heads for mixer in mixers(row("LagunaForCausalLM"))] == [6, 8, 6, 8, 4]
    inner = row("Step3p7ForConditionalGeneration")["text_config"]
    assert [mixer.query_heads for mixer in mixers(inner)] == [6, 8, 6, 8, 6]
    other = inner | {"num_sliding_attention_heads": None, "attention_other_setting": {"num_attention_heads": 10}}
    assert [mixer.query_heads for mixer in mixers(other)] == [6, 10, 6, 10, 6]


def test_types_of_layers_that_predict_come_last_in_the_list_of_step() -> None:
    inner = row("Step3p7ForConditionalGeneration")["text_config"]
    padded = inner | {"layer_types": [*inner["layer_types"], "sliding_attention"], "num_nextn_predict_layers": 1}
    assert spec_of(padded).parameters == spec_of(inner).parameters
    assert spec_of(inner, moe_layers_enum="3,4").parameters == spec_of(inner).parameters


def block(group: int | None, mult: float | None) -> dict[str, Any]:
    attention = {"no_op": group is None, "n_heads_in_group": group, "window_length": None}
    return {"attention": attention, "ffn": {"no_op": mult is None, "ffn_mult": mult}}


DECI: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "block_configs": [block(4, 1.5), block(None, 0.4), block(8, None)],
}


def test_blocks_of_a_searched_model_lack_a_half_and_its_norm() -> None:
    """2 x 1.5 x 512 / 3 = 512 wide; 0.4 of it 136, rounded up to 256."""
    spec = spec_of(DECI)
    first = 512 * (2 * 512 + 2 * 2 * 64) + 3 * 512 * 512 + 2 * 512
    second = 3 * 512 * 256 + 512
    third = 512 * (2 * 512 + 2 * 64) + 512
    assert sum(spec.parameters.values()) == first + second + third + 512 + 2 * 512 * 100
    assert spec.attention_layers == 2


def test_blocks_without_halves_leave_a_quantiser_nothing_but_the_ends() -> None:
    empty = DECI | {"block_configs": [block(None, None)] * 3}
    spec = spec_of(empty, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    assert (spec.weights.format, spec.weights.bits) == ("bf16", 16)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DECI, {"block_configs": [block(4, 1.0)]}, "block_configs: is no list of one block for each of 3 layers"),
        (DECI, {"block_configs": [block(3, 1.0)] * 3}, r"block_configs\[0\].attention.n_heads_in_group: is 3"),
        (DECI, {"block_configs": [7] * 3}, r"block_configs\[0\]: is no table"),
        (
            row("LagunaForCausalLM"),
            {"num_attention_heads_per_layer": [6]},
            "num_attention_heads_per_layer .* contradict",
        ),
        (
            row("LagunaForCausalLM"),
            {"num_attention_heads_per_layer": [5] * 5},
            "of which 5 query heads are no multiple",
        ),
        (row("MiMoV2FlashForCausalLM"), {"hybrid_layer_pattern": [0]}, "hybrid_layer_pattern .* contradict"),
        (row("MiMoV2FlashForCausalLM"), {"swa_head_dim": 8}, "swa_head_dim: is not the 24"),
    ],
)
def test_what_is_not_known_of_them_is_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFile, match=message):
        spec_of(config, **changes)
