"""How many tokens fit into so many blocks, for pools of any shape."""

from hypothesis import given
from hypothesis import strategies as st

from tests.twin.serving import worlds
from tests.twin.serving.worlds import HybridPool
from tests.worlds import LAWS
from twin.serving.blocks import UNLIMITED, BlockPool, Ledger, PagedPool
from twin.serving.growth import ByHeap, ByModulus, growth
from twin.serving.requests import Limits


@LAWS
@given(worlds.pools(), st.integers(0, 200))
def test_room_is_the_most_tokens_of_so_many_blocks(pool: BlockPool, tokens: int) -> None:
    ledger = Ledger(pool.blocks, pool.blocks_for)
    blocks = pool.blocks_for(tokens)
    room = ledger.room(blocks)
    assert room >= tokens
    assert pool.blocks_for(room) == blocks
    assert room > UNLIMITED or pool.blocks_for(room + 1) > blocks


@LAWS
@given(worlds.pools(), st.integers(0, 200))
def test_whole_blocks_are_full(pool: BlockPool, tokens: int) -> None:
    ledger = Ledger(pool.blocks, pool.blocks_for)
    whole, blocks = ledger.whole(tokens)
    assert 0 <= whole <= tokens
    assert blocks == pool.blocks_for(whole) - pool.blocks_for(0)
    assert not blocks or pool.blocks_for(whole + 1) > pool.blocks_for(whole)


def test_blocks_that_never_fill_up_have_room_for_everything() -> None:
    assert Ledger(9, lambda tokens: min(tokens, 4)).room(4) > UNLIMITED


def test_taking_evicts_idle_prefixes_and_no_more_than_it_must() -> None:
    ledger = Ledger(10, lambda tokens: tokens)
    assert ledger.take(8)
    for name in "abc":
        ledger.rest((name, 2), 2)
    assert (ledger.in_use, ledger.idle_blocks) == (2, 6)
    assert ledger.take(3)
    assert list(ledger.idle) == [("b", 2), ("c", 2)]
    assert not ledger.take(6)
    assert (ledger.in_use, ledger.idle_blocks) == (5, 4)
    ledger.wake(("c", 2))
    assert (ledger.in_use, ledger.idle_blocks) == (7, 2)


def test_the_cheap_growth_is_for_even_blocks_only() -> None:
    even = PagedPool(blocks=100, block_tokens=16)
    speculating = Limits(speculative=1, tokens_per_step=1.5)
    ledger = Ledger(even.blocks, even.blocks_for)
    assert isinstance(growth(even, ledger, Limits()), ByModulus)
    assert isinstance(growth(even, ledger, speculating), ByHeap)
    assert isinstance(growth(even, ledger, Limits(reserve_output=True)), ByHeap)
    assert isinstance(growth(worlds.SilentPool(even), ledger, Limits()), ByHeap)
    broken_promise = HybridPool(blocks=100, block_tokens=16, window=100)
    assert isinstance(growth(broken_promise, ledger, Limits()), ByHeap)
