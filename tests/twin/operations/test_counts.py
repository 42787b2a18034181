"""Counts of Qwen3.8-Flash-Next against sums done by hand, and laws for other shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS, model
from twin.models import load_model
from twin.models.mixers import Indexer, conv_elements
from twin.models.spec import FeedForward
from twin.operations import counts

FLASH_NEXT = load_model("qwen3.8-flash-next")
INDEXER = FLASH_NEXT.indexer
GDN_CHANNELS = (16 + 16 + 48) * 128


def test_bytes_of_states_and_of_selections_and_elementwise_work() -> None:
    """fp16 state of 48 heads and the last three inputs of the convolution: 1,572,864 + 61,440 bytes."""
    (state,) = FLASH_NEXT.states
    assert conv_elements(state) == 3 * GDN_CHANNELS
    assert counts.state_bytes(state, 2) == 48 * 128 * 128 * 2 + 3 * GDN_CHANNELS * 2 == 1_634_304
    assert counts.state_bytes(state, 4) - counts.state_bytes(state, 2) == 48 * 128 * 128 * 2
    assert counts.block_run_bytes(INDEXER, 2048) == 4 * 2 * 256 * 2  # tokens x kv heads x dim x fp16, of K or of V
    assert [counts.padded_selection(INDEXER, alignment) for alignment in (32, 128, 1)] == [2080, 2176, 2051]
    (llama,) = load_model("llama-3.1-8b").kinds.values()
    assert counts.elementwise_elements(llama, 4096) == 8 * 4096 + 2 * 40 * 128 + 3 * 14_336


@pytest.mark.parametrize(
    ("end_tokens", "selected"),
    [(1, 1), (2048, 2048), (2051, 2051), (2052, 2048), (2053, 2049), (2055, 2051), (2056, 2048), (1_048_321, 2049)],
)
def test_selected_tokens_are_the_budget_and_the_open_tail(end_tokens: int, selected: int) -> None:
    assert INDEXER is not None
    assert counts.selected_tokens(INDEXER, end_tokens) == selected
    assert counts.is_sparse(INDEXER, end_tokens) is (end_tokens > INDEXER.threshold_tokens == 2051)


def test_a_key_for_every_token_selects_once_there_are_more_than_the_budget() -> None:
    """DeepSeek's indexer: no blocks, no open tail."""
    each = Indexer(query_heads=64, head_dim=128, budget=2048, ratio=1, weighted=True)
    assert [counts.selected_tokens(each, end) for end in (2047, 2048, 2049, 10**6)] == [2047, 2048, 2048, 2048]


def test_a_dense_model_selects_nothing_and_has_one_expert() -> None:
    dense = model(every=1, sparse=False)
    assert counts.complete_blocks(dense.indexer, 100) == counts.padded_selection(dense.indexer, 32) == 0
    assert not counts.is_sparse(dense.indexer, 10**6)
    assert counts.selected_tokens(dense.indexer, 10**6) == 10**6
    assert counts.expected_experts(FeedForward(intermediate=4), 1000) == 1


@LAWS
@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 10**6))
def test_a_selection_holds_no_more_than_there_is_nor_than_its_padded_row(blocks: int, ratio: int, end: int) -> None:
    indexer = Indexer(query_heads=1, head_dim=4, budget=blocks * ratio, ratio=ratio)
    selected = counts.selected_tokens(indexer, end)
    assert 1 <= selected <= end
    if counts.is_sparse(indexer, end):
        assert selected <= counts.padded_selection(indexer, 32)
        assert selected % ratio == end % ratio  # whole blocks and the open tail


@LAWS
@given(st.integers(min_value=1, max_value=64), st.integers(min_value=1, max_value=10_000))
def test_distinct_experts_of_independent_tokens_lie_between_one_tokens_share_and_all(active: int, tokens: int) -> None:
    experts = counts.expected_experts(FeedForward(experts=64, active=active, intermediate=4), tokens)
    assert active - 1e-9 <= experts <= min(64, active * tokens) + 1e-9
    many = FLASH_NEXT.kinds["attention"].feed_forward
    assert many is not None
    for few, expected in ((1, 10.0), (2, 20 - 10 * 10 / 512), (10**6, 512.0)):
        assert counts.expected_experts(many, few) == pytest.approx(expected, rel=1e-12)
