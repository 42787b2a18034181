"""Gemma 1 to 4: parameters to the unit, windows, caches that layers share, and what contradicts."""

from typing import Any

import pytest

from tests.twin.models.config.counted import Counted, cached, counted, kept, one, spec, total
from twin.errors import BadFile
from twin.models.mixers import Attention
from twin.models.spec import ModelSpec


def text(name: str, **changes: Any) -> dict[str, Any]:
    """The language model's table of one row with keys changed, or taken away where they are None."""
    config = {key: value for key, value in (one("gemma", name)["text_config"] | changes).items() if value is not None}
    return config | {"architectures": [one("gemma", name)["architectures"][0]]}


def attention(model: ModelSpec) -> list[Attention]:
    """Of each layer."""
    mixers = [model.kinds[kind].mixers[0] for kind in model.layer_kinds]
    return [mixer for mixer in mixers if isinstance(mixer, Attention)]


@pytest.mark.parametrize("row", counted("gemma"), ids=lambda row: row.name)
def test_parameters_are_those_of_the_class(row: Counted) -> None:
    assert total(row.config) == row.parameters


@pytest.mark.parametrize("row", cached("gemma"), ids=lambda row: row.name)
def test_each_layer_keeps_what_that_of_the_class_does(row: Counted) -> None:
    assert kept(row.config) == row.cache


def test_windows_alternate_or_come_five_in_a_row() -> None:
    assert [each.window for each in attention(spec(one("gemma", "gemma2")))] == [128, 0, 128, 0, 128]
    assert [each.window for each in attention(spec(one("gemma", "gemma3")))] == [128] * 5 + [0] + [128] * 2


def test_the_last_layers_of_gemma_3n_read_caches_of_earlier_ones() -> None:
    model = spec(one("gemma", "gemma3n"))
    assert [each.shares_kv for each in attention(model)] == [False] * 5 + [True] * 5
    assert sum(model.caches.values()) == 5
    assert [each.window for each in attention(model)] == [128, 128, 128, 128, 0] * 2


def test_gemma_3n_keeps_streams_and_reads_rows_of_its_layers_tables() -> None:
    model = spec(one("gemma", "gemma3n"))
    assert (model.residual_streams, model.tables) == (4, 990 * 10 * 12)
    assert model.parameters["embedding"] == 1000 * 64 + model.tables


def test_full_layers_of_gemma_4_have_heads_of_their_own_width() -> None:
    near, far = attention(spec(one("gemma", "gemma4")))[4:6]
    assert (near.head_dim, near.window, far.head_dim, far.window) == (24, 128, 32, 0)


def test_values_from_the_matrix_of_keys_are_cached_all_the_same() -> None:
    far = attention(spec(text("gemma4moe")))[5]
    apart = attention(spec(text("gemma4moe", attention_k_eq_v=False)))[5]
    assert (far.values_from_keys, far.kv_heads, far.kv_elements) == (True, 1, 2 * 32)
    assert (apart.values_from_keys, apart.kv_heads, apart.kv_elements) == (False, 2, 2 * 2 * 32)


def test_layers_that_share_have_feed_forwards_twice_as_wide_where_said() -> None:
    wide, plain = spec(text("gemma4")), spec(text("gemma4", use_double_wide_mlp=False))
    assert wide.parameters["feed_forward"] - plain.parameters["feed_forward"] == 4 * 3 * 64 * 96


def test_what_published_files_of_gemma_3_leave_out() -> None:
    left_out = ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings")
    model = spec(text("gemma3", **dict.fromkeys(left_out)))
    assert (model.vocab, model.native_ctx_tokens) == (262208, 131072)
    assert {(each.query_heads, each.kv_heads, each.head_dim) for each in attention(model)} == {(8, 4, 256)}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (one("gemma", "gemma1", use_bidirectional_attention=True), "use_bidirectional_attention: is set"),
        (one("gemma", "gemma2", sliding_window=None), "layer_types .* and sliding_window .* contradict"),
        (text("gemma3", layer_types=["full_attention"] * 8), "layer_types .* and sliding_window_pattern 6 contradict"),
        (one("gemma", "gemma3n", num_kv_shared_layers=8), "num_kv_shared_layers 8 and num_hidden_layers 10 contradict"),
        (
            one("gemma", "gemma3n", intermediate_size=[9]),
            r"intermediate_size \[9\] and num_hidden_layers 10 contradict",
        ),
        (
            text("gemma4", layer_types=["full_attention"] + ["sliding_attention"] * 11),
            "ends without full_attention",
        ),
        (text("gemma4moe", top_k_experts=9), "top_k_experts 9 and num_experts 8 contradict"),
        (text("gemma4moe", num_global_key_value_heads=3), "num_attention_heads 4 and num_global_key_value_heads 3"),
    ],
)
def test_what_contradicts_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(BadFile, match=said):
        spec(config)
