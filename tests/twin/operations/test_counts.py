"""Counts of Qwen3.8-Flash-Next against sums done by hand, and laws for other shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.worlds import LAWS, model
from twin.models import load_model
from twin.models.spec import FeedForward, Indexer
from twin.operations import counts

FLASH_NEXT = load_model("qwen3.8-flash-next")
HIDDEN, QUERY_WIDTH, KV_WIDTH = 2560, 24 * 256, 2 * 256
GDN_CHANNELS, GDN_WIDTH, GDN_HEADS = (16 + 16 + 48) * 128, 48 * 128, 48


def test_routed_experts_of_one_token_in_one_layer() -> None:
    assert 10 * counts.parameters(FLASH_NEXT).expert == 10 * 3 * HIDDEN * 640 == 49_152_000


def test_router_and_shared_expert() -> None:
    assert counts.parameters(FLASH_NEXT).always_on == HIDDEN * 512 + 3 * HIDDEN * 640 == 6_225_920


def test_recurrent_layer() -> None:
    """Projections to queries, keys, values, gate and two scalars a head; the way back; the convolution."""
    by_hand = HIDDEN * (GDN_CHANNELS + GDN_WIDTH + 2 * GDN_HEADS) + GDN_WIDTH * HIDDEN + GDN_CHANNELS * 4
    assert counts.parameters(FLASH_NEXT).recurrent == by_hand == 57_958_400


def test_attention_layer() -> None:
    """Gated queries, keys and values, the way back, four index queries and one index key."""
    by_hand = HIDDEN * 2 * QUERY_WIDTH + HIDDEN * 2 * KV_WIDTH + QUERY_WIDTH * HIDDEN + HIDDEN * 5 * 128
    assert counts.parameters(FLASH_NEXT).attention == by_hand == 51_445_760


def test_active_parameters_of_the_whole_model() -> None:
    layers = sum(counts.layer_active_parameters(FLASH_NEXT, kind) for kind in FLASH_NEXT.layer_kinds)
    by_hand = 36 * (57_958_400 + 6_225_920 + 49_152_000) + 12 * (51_445_760 + 6_225_920 + 49_152_000)
    assert layers == by_hand
    assert layers + counts.parameters(FLASH_NEXT).head == 5_997_690_880  # 6.0B


def test_all_parameters_of_the_whole_model() -> None:
    layers = sum(counts.layer_parameters(FLASH_NEXT, kind) for kind in FLASH_NEXT.layer_kinds)
    ends = counts.parameters(FLASH_NEXT).head + counts.parameters(FLASH_NEXT).embedding
    assert (layers + ends) / 1e9 == pytest.approx(125, abs=0.5)


def test_weights_and_embedding_in_bytes() -> None:
    assert counts.weight_bytes(FLASH_NEXT, 8_000_000) == 4_050_000
    assert counts.embedding_bytes(FLASH_NEXT) == HIDDEN * 248_320 * 2


def test_recurrent_state_of_one_sequence() -> None:
    """fp16 state of 48 heads and the last three inputs of the convolution: 1,572,864 + 61,440 bytes."""
    assert counts.state_bytes(FLASH_NEXT, 2) == 48 * 128 * 128 * 2 + 3 * GDN_CHANNELS * 2 == 1_634_304
    assert counts.state_bytes(FLASH_NEXT, 4) - counts.state_bytes(FLASH_NEXT, 2) == 48 * 128 * 128 * 2


def test_indexer_keys_and_runs() -> None:
    assert counts.index_key_bytes(FLASH_NEXT, 2) == 128 * 2
    assert counts.block_run_bytes(FLASH_NEXT, 2048) == 4 * 2 * 256 * 2  # tokens x kv heads x dim x fp16, of K or of V


def test_padded_selection() -> None:
    assert counts.padded_selection(FLASH_NEXT, 32) == 2080
    assert counts.padded_selection(FLASH_NEXT, 128) == 2176
    assert counts.padded_selection(FLASH_NEXT, 1) == 2051


def test_sparse_threshold() -> None:
    assert counts.sparse_threshold(FLASH_NEXT) == 2051
    assert [counts.is_sparse(FLASH_NEXT, end) for end in (1, 2051, 2052, 10**6)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("end_tokens", "selected"),
    [(1, 1), (2048, 2048), (2051, 2051), (2052, 2048), (2053, 2049), (2055, 2051), (2056, 2048), (1_048_321, 2049)],
)
def test_selected_tokens_are_the_budget_and_the_open_tail(end_tokens: int, selected: int) -> None:
    assert counts.selected_tokens(FLASH_NEXT, end_tokens) == selected


@pytest.mark.parametrize(("tokens", "expected"), [(1, 10.0), (2, 20 - 10 * 10 / 512), (10**6, 512.0)])
def test_distinct_experts_of_independent_tokens(tokens: int, expected: float) -> None:
    assert counts.expected_experts(FLASH_NEXT, tokens) == pytest.approx(expected, rel=1e-12)


def test_a_step_reads_at_least_what_a_token_runs_through_and_at_most_every_expert() -> None:
    read = [counts.layer_read_parameters(FLASH_NEXT, "attention", tokens) for tokens in (1, 2, 8, 64, 4096)]
    assert read == sorted(read)
    assert read[0] == pytest.approx(counts.layer_active_parameters(FLASH_NEXT, "attention"), rel=1e-12)
    assert read[-1] <= counts.layer_parameters(FLASH_NEXT, "attention")


def test_a_dense_model_has_no_indexer_no_router_and_one_expert() -> None:
    dense = model(every=1, sparse=False)
    assert counts.sparse_threshold(dense) == counts.index_key_bytes(dense, 2) == 0
    assert counts.state_bytes(dense, 2) == counts.complete_blocks(dense, 100) == counts.padded_selection(dense, 32) == 0
    assert not counts.is_sparse(dense, 10**6)
    assert counts.selected_tokens(dense, 10**6) == 10**6
    assert counts.expected_experts(dense, 1000) == 1
    assert counts.layer_parameters(dense, "attention") == counts.layer_active_parameters(dense, "attention")
    assert counts.parameters(dense).attention == 8 * 32 + 8 * 2 * 16 + 32 * 8
    assert counts.parameters(dense).recurrent == counts.parameters(dense).always_on == 0


SHAPES = st.tuples(st.integers(min_value=1, max_value=64), st.integers(min_value=1, max_value=16))


@LAWS
@given(SHAPES, st.integers(min_value=1, max_value=10**6))
def test_a_selection_holds_no_more_than_there_is_nor_than_its_padded_row(shape: tuple[int, int], end: int) -> None:
    blocks, ratio = shape
    spec = replace(model(), indexer=Indexer(query_heads=1, head_dim=4, budget=blocks * ratio, ratio=ratio))
    selected = counts.selected_tokens(spec, end)
    assert 1 <= selected <= end
    if counts.is_sparse(spec, end):
        assert selected <= counts.padded_selection(spec, 32)
        assert selected % ratio == end % ratio  # whole blocks and the open tail


@LAWS
@given(st.integers(min_value=1, max_value=64), st.integers(min_value=1, max_value=10_000))
def test_distinct_experts_lie_between_one_tokens_share_and_all(active: int, tokens: int) -> None:
    feed = FeedForward(experts=64, active=active, intermediate=4, shared_intermediate=0)
    experts = counts.expected_experts(replace(model(), feed_forward=feed), tokens)
    assert active - 1e-9 <= experts <= min(64, active * tokens) + 1e-9
