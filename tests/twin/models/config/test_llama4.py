"""Llama 4: parameters to the unit, chunks and full attention, where experts are, and what contradicts."""

from typing import Any

import pytest

from tests.twin.models.config.counted import Counted, cached, counted, kept, one, spec, total
from twin.errors import BadFile
from twin.models.mixers import Attention


@pytest.mark.parametrize("row", counted("llama4"), ids=lambda row: row.name)
def test_parameters_are_those_of_the_class(row: Counted) -> None:
    assert total(row.config) == row.parameters


@pytest.mark.parametrize("row", cached("llama4"), ids=lambda row: row.name)
def test_each_layer_keeps_what_that_of_the_class_does(row: Counted) -> None:
    assert kept(row.config) == row.cache


def chunks(config: dict[str, Any]) -> list[int]:
    """Of each layer."""
    model = spec(config)
    mixers = [model.kinds[kind].mixers[0] for kind in model.layer_kinds]
    return [mixer.local_chunk for mixer in mixers if isinstance(mixer, Attention)]


def test_three_layers_of_four_attend_in_chunks_and_the_fourth_to_all() -> None:
    assert chunks(one("llama4", "llama4")) == [128, 128, 128, 0] * 2


def test_layers_without_rotary_positions_attend_to_all() -> None:
    assert chunks(one("llama4", "llama4text")) == [128, 128, 0, 128, 128, 0, 128, 128]
    assert chunks(one("llama4", "llama4text", attention_chunk_size=None)) == [0] * 8


def test_experts_are_in_every_second_layer_or_where_the_file_lists_them() -> None:
    spaced = one("llama4", "llama4text", interleave_moe_layer_step=2)
    listed = one("llama4", "llama4text", interleave_moe_layer_step=None, moe_layers=[1, 3, 5, 7])
    assert spec(spaced).layer_kinds == spec(listed).layer_kinds
    assert [kind.endswith("moe") for kind in spec(spaced).layer_kinds] == [False, True] * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_layers": [0]}, r"moe_layers \[0\] and interleave_moe_layer_step 1 contradict"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers \[1, 0\] and num_hidden_layers 8 contradict"),
        (
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 8},
            "layer_types .* and attention_chunk_size None contradict",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 and num_local_experts 8 contradict"),
    ],
)
def test_what_contradicts_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadFile, match=said):
        spec(one("llama4", "llama4text", **changes))
