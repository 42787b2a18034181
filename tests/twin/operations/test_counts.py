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


def test_parameters_by_part() -> None:
    """Ten experts and a shared one; gated attention with an indexer; a recurrence with its convolution: 6.0B active."""
    parts = counts.parameters(FLASH_NEXT)
    assert 10 * parts.expert == 10 * 3 * HIDDEN * 640 == 49_152_000
    assert parts.always_on == HIDDEN * 512 + 3 * HIDDEN * 640 == 6_225_920
    attention = HIDDEN * 2 * QUERY_WIDTH + HIDDEN * 2 * KV_WIDTH + QUERY_WIDTH * HIDDEN + HIDDEN * 5 * 128
    assert parts.attention == attention == 51_445_760
    projections = HIDDEN * (GDN_CHANNELS + GDN_WIDTH + 2 * GDN_HEADS) + GDN_WIDTH * HIDDEN
    assert parts.recurrent == projections + GDN_CHANNELS * 4 == 57_958_400
    active = sum(counts.layer_active_parameters(FLASH_NEXT, kind) for kind in FLASH_NEXT.layer_kinds)
    assert active == 36 * 57_958_400 + 12 * 51_445_760 + 48 * (6_225_920 + 49_152_000) == 5_997_690_880 - parts.head


def test_bytes_of_weights_states_and_keys_and_elementwise_work() -> None:
    """fp16 state of 48 heads and the last three inputs of the convolution: 1,572,864 + 61,440 bytes."""
    assert counts.weight_bytes(FLASH_NEXT, 8_000_000) == 4_050_000
    assert counts.embedding_bytes(FLASH_NEXT) == HIDDEN * 248_320 * 2
    assert counts.state_bytes(FLASH_NEXT, 2) == 48 * 128 * 128 * 2 + 3 * GDN_CHANNELS * 2 == 1_634_304
    assert counts.state_bytes(FLASH_NEXT, 4) - counts.state_bytes(FLASH_NEXT, 2) == 48 * 128 * 128 * 2
    assert counts.index_key_bytes(FLASH_NEXT, 2) == 128 * 2
    assert counts.block_run_bytes(FLASH_NEXT, 2048) == 4 * 2 * 256 * 2  # tokens x kv heads x dim x fp16, of K or of V
    assert [counts.padded_selection(FLASH_NEXT, alignment) for alignment in (32, 128, 1)] == [2080, 2176, 2051]
    for name, bits in (("qwen3.8-27b-fast", 4.125), ("qwen3.8-27b", 8.125)):
        assert counts.head_bytes(load_model(name)) == 5120 * 248_320 * bits / 8
    llama = load_model("llama-3.1-8b")
    assert counts.elementwise_elements(llama, "attention") == 8 * 4096 + 2 * 40 * 128 + 3 * 14_336


@pytest.mark.parametrize(
    ("end_tokens", "selected"),
    [(1, 1), (2048, 2048), (2051, 2051), (2052, 2048), (2053, 2049), (2055, 2051), (2056, 2048), (1_048_321, 2049)],
)
def test_selected_tokens_are_the_budget_and_the_open_tail(end_tokens: int, selected: int) -> None:
    assert counts.selected_tokens(FLASH_NEXT, end_tokens) == selected
    assert counts.is_sparse(FLASH_NEXT, end_tokens) is (end_tokens > counts.sparse_threshold(FLASH_NEXT) == 2051)


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


@LAWS
@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 10**6))
def test_a_selection_holds_no_more_than_there_is_nor_than_its_padded_row(blocks: int, ratio: int, end: int) -> None:
    spec = replace(model(), indexer=Indexer(query_heads=1, head_dim=4, budget=blocks * ratio, ratio=ratio))
    selected = counts.selected_tokens(spec, end)
    assert 1 <= selected <= end
    if counts.is_sparse(spec, end):
        assert selected <= counts.padded_selection(spec, 32)
        assert selected % ratio == end % ratio  # whole blocks and the open tail


@LAWS
@given(st.integers(min_value=1, max_value=64), st.integers(min_value=1, max_value=10_000))
def test_distinct_experts_of_independent_tokens_lie_between_one_tokens_share_and_all(active: int, tokens: int) -> None:
    feed = FeedForward(experts=64, active=active, intermediate=4, shared_intermediate=0)
    experts = counts.expected_experts(replace(model(), feed_forward=feed), tokens)
    assert active - 1e-9 <= experts <= min(64, active * tokens) + 1e-9
    for few, expected in ((1, 10.0), (2, 20 - 10 * 10 / 512), (10**6, 512.0)):
        assert counts.expected_experts(FLASH_NEXT, few) == pytest.approx(expected, rel=1e-12)
        read = counts.parameters(FLASH_NEXT).always_on + expected * 3 * HIDDEN * 640
        assert counts.feed_forward_read_parameters(FLASH_NEXT, few) == pytest.approx(read, rel=1e-12)
