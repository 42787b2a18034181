"""How many tokens blocks hold, and shared prefixes: computed once, counted once, gone when their blocks are needed."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.twin.serving import worlds
from tests.twin.serving.worlds import Affine, PagedPool, request, serve
from tests.worlds import LAWS
from twin.serving.blocks import UNLIMITED, BlockPool, Ledger, Prefixes
from twin.serving.engine import simulate_serving
from twin.serving.requests import Limits, Request


@LAWS
@given(worlds.pools(), st.integers(0, 200))
def test_room_is_the_most_tokens_of_so_many_blocks_and_whole_ones_are_full(pool: BlockPool, tokens: int) -> None:
    ledger, blocks = Ledger(pool.blocks, pool.blocks_for), pool.blocks_for(tokens)
    room = ledger.room(blocks)
    assert room >= tokens
    assert pool.blocks_for(room) == blocks
    assert room > UNLIMITED or pool.blocks_for(room + 1) > blocks
    whole, blocks = ledger.whole(tokens)
    assert 0 <= whole <= tokens
    assert blocks == pool.blocks_for(whole) - pool.blocks_for(0)
    assert not blocks or pool.blocks_for(whole + 1) > pool.blocks_for(whole)
    assert Ledger(9, lambda tokens: min(tokens, 4)).room(4) > UNLIMITED  # blocks that never fill up


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


FOURS = PagedPool(blocks=100, block_tokens=4)


def test_the_second_request_skips_the_whole_blocks_of_the_prefix() -> None:
    result = serve([request(0, 10, 1, prefix=10), request(1, 12, 1, at=20.0, prefix=10)], pool=FOURS)
    first, second = result.requests
    assert (first.cached_tokens, first.ttft_s) == (0, 11.0)
    assert (second.cached_tokens, second.ttft_s) == (8, 5.0)  # 4 of its 12 tokens are left
    assert result.cached_tokens == 8


def test_a_prefix_is_cached_from_the_step_that_computes_it_for_those_of_its_name_and_length() -> None:
    result = serve([request(index, 9, 1, prefix=8) for index in range(5)], pool=FOURS)
    assert [each.cached_tokens for each in result.requests] == [0, 8, 8, 8, 8]
    assert result.total_s == 1 + 9 + 4
    assert result.pool_peak_blocks == 2 + 5  # the prefix once, and a block of each
    others = ((8, "a"), (8, "b"), (12, "a"), (12, "a"))
    requests = [request(at, 20, 1, prefix=prefix, name=name) for at, (prefix, name) in enumerate(others)]
    assert [each.cached_tokens for each in serve(requests, pool=FOURS).requests] == [0, 0, 0, 12]


def test_the_idle_prefix_used_least_recently_gives_way_to_those_who_run() -> None:
    """One of 4 of 5 blocks: one of the two idle prefixes has to go, and a was used again."""
    pool = PagedPool(blocks=5, block_tokens=4)
    requests = [request(at, 8, 1, at=20.0 * at, prefix=4, name=name) for at, name in enumerate("abacab")]
    wide = request(9, 16, 1, at=50.0)
    cached = [each.cached_tokens for each in serve([*requests[:3], wide, *requests[3:]], pool=pool).requests]
    assert cached == [0, 0, 4, 0, 0, 4, 0]


def test_a_preempted_sequence_finds_its_prefix_again() -> None:
    pool = PagedPool(blocks=6, block_tokens=4)
    requests = [request(index, 9, 8, prefix=8) for index in range(3)]
    with_cache = serve(requests, pool=pool)
    without = serve(requests, pool=pool, prefix_cache=False)
    assert with_cache.preemptions > 0
    assert with_cache.total_s < without.total_s


def hashed(index: int, ids: str, prompt: int, at: float) -> Request:
    shared = {"prefix_ids": tuple(ids), "prefix_tokens": min(prompt, 8 * len(ids)), "prefix_span": 8}
    return replace(request(index, prompt, 1, at=at), **shared)


def test_a_trace_of_hashes_shares_its_longest_common_start() -> None:
    requests = [hashed(0, "abc", 24, 0.0), hashed(1, "abd", 24, 50.0), hashed(2, "xbc", 24, 100.0)]
    requests += [hashed(3, "abde", 30, 150.0), hashed(4, "a", 5, 200.0)]
    result = serve(requests, pool=FOURS)
    assert [each.cached_tokens for each in result.requests] == [0, 16, 0, 24, 0]


def test_pieces_are_whole_blocks_without_those_of_the_sequence() -> None:
    pool = PagedPool(blocks=100, block_tokens=4, sequence_blocks=2)
    prefixes = Prefixes(Ledger(pool.blocks, pool.blocks_for))
    pieces = prefixes.pieces(hashed(0, "abc", 23, 0.0))
    found = [(piece.key, piece.end, piece.blocks) for piece in pieces]
    assert found == [(("a", 8), 8, 2), (("b", 16), 16, 2), (("c", 23), 20, 1)]
    assert prefixes.pieces(request(0, 9, 1, prefix=3)) == ()


@LAWS
@given(worlds.workloads(prefixes=True), worlds.costs(), worlds.limits())
def test_in_a_large_pool_the_cache_only_saves(requests: list[Request], costs: Affine, limits: Limits) -> None:
    there = [replace(each, arrival_s=0.0) for each in requests]
    pool: BlockPool = PagedPool(blocks=10**6, block_tokens=3)
    with_cache = simulate_serving(there, costs, pool, limits)
    without = simulate_serving(there, costs, pool, replace(limits, prefix_cache=False))
    assert with_cache.completed == without.completed
    assert with_cache.preemptions == without.preemptions == 0
    assert 0 <= with_cache.cached_tokens <= sum(each.prefix_tokens for each in there)
