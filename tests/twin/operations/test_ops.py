"""A step as attention sees it that looks back over a window, or to the beginning of the query's own chunk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS, step


def seen_one_by_one(kv_tokens: int, q_tokens: int, *, window: int = 0, chunk: int = 0) -> int:
    """Pairs counted token by token: each sees itself and those before it."""
    positions = range(kv_tokens, kv_tokens + q_tokens)
    return sum(min(at + 1, window) if window else at % chunk + 1 for at in positions)


@LAWS
@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 200))
def test_pairs_within_a_window_or_a_chunk_are_those_counted_one_by_one(kv: int, q_tokens: int, reach: int) -> None:
    window, chunk = step(kv, q_tokens).within_window(reach), step(kv, q_tokens).within_chunk(reach)
    assert window.pairs == seen_one_by_one(kv, q_tokens, window=reach)
    assert chunk.pairs == seen_one_by_one(kv, q_tokens, chunk=reach)
    assert window.end == min(kv, reach - 1) + q_tokens
    assert chunk.end == kv % reach + q_tokens


@pytest.mark.parametrize("batch", [1, 3])
def test_a_window_that_holds_the_whole_past_changes_nothing_but_is_counted(batch: int) -> None:
    whole = step(40, 8, batch)
    for seen in (whole.within_window(48), whole.within_chunk(48)):
        assert (seen.pairs, seen.end, seen.kv_tokens, seen.batch) == (whole.pairs, 48, 40, batch)
