"""Blocks, pages and groups of layers of all types: on paper for each kind, and laws for any layers."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.worlds import LAWS
from twin.errors import BadValue, Impossible
from twin.memory.blocks import BlockPlan, CacheSpec, PoolSettings, plan_blocks

SETTINGS = PoolSettings(
    promotes_sliding=True, balances_groups=True, speculative_tokens=0, prefix_caching=False, batched_tokens=2048,
    async_scheduling=True,
)  # fmt: skip

SIZES = {
    "attention": {"token_bytes": 4096},
    "recurrent": {"state_bytes": 1_634_304},
    "sliding": {"token_bytes": 4096, "window": 2048},
}


def spec(kind: Any, layers: int, **more: Any) -> CacheSpec:
    return CacheSpec(kind=kind, layers=layers, **(SIZES[kind] | more))


@pytest.mark.parametrize(
    ("layers", "balances", "full", "groups"),
    [
        ((16, 48, 5), True, 8, [8] * 8 + [5]), ((16, 48, 5), False, 5, [4] * 6 + [5] * 9),
        ((16, 48, 8), True, 16, [16] * 4 + [8]), ((16, 48, 4), True, 8, [8] * 8 + [4]),
        ((16, 48, 3), True, 4, [4] * 16 + [3]), ((17, 48, 5), True, 5, [4] * 5 + [5] * 10),
        ((10, 0, 20), True, 10, [10] * 3), ((13, 0, 12), True, 13, [13, 12]),
        ((12, 0, 8), False, 8, [6, 6, 8]), ((16, 48, 0), True, 16, [16] * 4),
    ],
)  # fmt: skip
def test_groups_are_as_long_as_the_fewest_layers_of_a_type_unless_padding_windows_is_cheaper(
    layers: tuple[int, int, int], *, balances: bool, full: int, groups: list[int]
) -> None:
    kinds = zip(("attention", "recurrent", "sliding"), layers, strict=True)
    specs = [spec(kind, count) for kind, count in kinds if count]
    plan = plan_blocks(specs, replace(SETTINGS, balances_groups=balances))
    assert plan.group_layers == full
    assert sorted(group.layers for group in plan.groups) == sorted(groups)


def test_layers_that_cannot_share_a_pool_sizes_of_another_kind_and_an_empty_request_are_refused() -> None:
    odd = spec("sliding", 5, token_bytes=2112, takes_padding=False)
    hybrid = [spec("attention", 16, token_bytes=2080), spec("recurrent", 48), odd]
    with pytest.raises(Impossible, match="sliding layers neither divides 1,664,000 B"):
        plan_blocks(hybrid, replace(SETTINGS, promotes_sliding=False))
    with pytest.raises(BadValue, match="at least 1 token"):
        plan_blocks([spec("attention", 16)], SETTINGS).blocks_per_request(0)
    for wrong in ({"layers": 0}, {"token_bytes": 0}, {"token_bytes": -1}, {"state_bytes": 1}, {"kernel_block": 0}):
        with pytest.raises(BadValue, match=f"{next(iter(wrong))} of attention layers"):
            replace(spec("attention", 16), **wrong)


def test_attention_of_half_a_windows_bytes_has_blocks_twice_as_long() -> None:
    """Gemma 4 12B: 8 layers of 2 KiB a token among 40 of 8 KiB. 16 KiB a token grow, as without any padding."""
    layers = [spec("sliding", 40, token_bytes=8192, window=1024), spec("attention", 8, token_bytes=2048)]
    plan = plan_blocks(layers, SETTINGS)
    assert (plan.block_tokens, plan.page_bytes, plan.group_layers, plan.growing_blocks) == (64, 131_072, 8, 1)
    assert Counter((group.kind, group.block_tokens) for group in plan.groups) == {
        ("sliding", 16): 5,
        ("attention", 64): 1,
    }
    assert plan.block_bytes / plan.block_tokens == 16_384
    assert plan.held_blocks(100) == 5 * (7 + 1)
    assert plan.held_blocks(10**6) == 5 * ((1023 + 2 * 2048 + 15) // 16 + 1)


@pytest.mark.parametrize(
    ("layers", "page_bytes", "blocks"),
    [
        # a compressed cache and its indexer's keys
        ([spec("attention", 61, token_bytes=size, kernel_block=64) for size in (1152, 132)], 61 * 64 * 1284, [1, 2]),
        # two layers at either end in 16 bits
        ([spec("attention", n, token_bytes=t, kernel_block=32) for n, t in ((4, 4096), (28, 1072))], 1_484_800, [2, 3]),
        # windows of one length, heads of two
        ([spec("sliding", 2, token_bytes=size, window=33) for size in (100, 50)], 16 * 300, [5, 6]),
        # states of two kinds
        ([spec("recurrent", 3, state_bytes=size) for size in (1000, 10)], 3030, [1, 1]),
    ],
)
def test_layers_that_need_the_same_tokens_are_one_group(
    layers: list[CacheSpec], page_bytes: int, blocks: list[int]
) -> None:
    """A block is a page of each, and none is padded."""
    plan = plan_blocks(layers, SETTINGS)
    assert len(plan.groups) == plan.group_layers == 1
    assert plan.block_bytes == plan.page_bytes == plan.groups[0].page_bytes == page_bytes
    assert [plan.blocks_per_request(tokens) for tokens in (64, 65)] == blocks


def test_layers_of_one_kind_that_need_other_tokens_are_apart() -> None:
    """Windows of two lengths; two shapes of attention beside a window, the smaller in longer blocks."""
    windows = plan_blocks([spec("sliding", 4, window=window) for window in (64, 128)], SETTINGS)
    assert [group.reach_tokens for group in windows.groups] == [63 + 4096, 127 + 4096]
    assert (windows.block_tokens, windows.growing_blocks) == (16, 0)
    beside = [spec("attention", 4), spec("attention", 4, token_bytes=2048), spec("sliding", 4)]
    plan = plan_blocks(beside, SETTINGS)
    assert [(group.kind, group.block_tokens) for group in plan.groups] == [
        ("attention", 16),
        ("attention", 32),
        ("sliding", 16),
    ]
    assert (plan.block_tokens, plan.growing_blocks) == (32, 3)
    assert plan.blocks_per_request(320) == 20 + 10 + 21


def test_what_never_grows_is_held_by_the_shortest_request() -> None:
    windows = plan_blocks([spec("sliding", 32, window=4096)], SETTINGS)
    assert (windows.block_tokens, windows.group_layers, windows.growing_blocks) == (16, 32, 0)
    assert [windows.held_blocks(tokens) for tokens in (1, 32, 8191, 10**6)] == [2, 3, 513, 513]
    states = plan_blocks([spec("recurrent", 64, state_bytes=2_158_592)], SETTINGS)
    assert (states.block_tokens, states.growing_blocks, states.block_bytes) == (16, 0, 64 * 2_158_592)
    assert [states.blocks_per_request(tokens) for tokens in (1, 10**6)] == [1, 1]
    assert states.printed_tokens(10, 4096) == 40_960


def test_a_page_of_the_attention_with_most_bytes_covers_a_state() -> None:
    layers = [spec("attention", 4, token_bytes=size) for size in (1024, 2048)]
    plan = plan_blocks([*layers, spec("recurrent", 8, state_bytes=100_000)], SETTINGS)
    assert plan.page_bytes == 64 * 2048
    assert [group.block_tokens for group in plan.groups] == [128, 64, 0, 0]


COUNT, SIZE, BOOL = st.integers(1, 64), st.integers(1, 8192), st.booleans()
UNIT = st.sampled_from([16, 64, 128])
FULL = st.builds(CacheSpec, kind=st.just("attention"), layers=COUNT, token_bytes=SIZE, kernel_block=UNIT)
STATE = st.builds(CacheSpec, kind=st.just("recurrent"), layers=COUNT, state_bytes=st.integers(1, 2**23))
WINDOW = st.builds(CacheSpec, kind=st.just("sliding"), layers=COUNT, token_bytes=SIZE, window=SIZE, kernel_block=UNIT)
SPECS = st.tuples(FULL, st.lists(STATE, max_size=1), st.lists(WINDOW, max_size=2)).map(
    lambda drawn: [drawn[0], *drawn[1], *drawn[2]]
)
ANY_SETTINGS = st.builds(
    PoolSettings,
    promotes_sliding=BOOL, balances_groups=BOOL, speculative_tokens=st.integers(0, 16), prefix_caching=BOOL,
    batched_tokens=SIZE, async_scheduling=BOOL,
)  # fmt: skip


@LAWS
@given(SPECS, ANY_SETTINGS)
def test_every_layer_lies_in_one_group_and_every_page_fits(specs: list[CacheSpec], settings: PoolSettings) -> None:
    """A promoted window fills more than half of its page."""
    plan = plan_blocks(specs, settings)
    layers: Counter[str] = Counter()
    for group in plan.groups:
        layers[group.kind] += group.layers
        assert group.page_bytes <= plan.page_bytes
        assert group.layers * group.page_bytes <= plan.block_bytes
        if settings.promotes_sliding and len(specs) < 4 and group.kind != "recurrent":
            assert 2 * group.page_bytes > plan.page_bytes
    for kind in ("attention", "recurrent", "sliding"):
        assert layers[kind] == sum(spec.layers for spec in specs if spec.kind == kind)
    assert max(group.layers for group in plan.groups) == plan.group_layers


@LAWS
@given(
    st.builds(plan_blocks, SPECS, ANY_SETTINGS),
    st.integers(0, 2**40),
    st.integers(1, 2**20),
    st.integers(0, 2**20),
)
def test_blocks_fill_a_pool_and_a_longer_request_never_takes_fewer(
    plan: BlockPlan, pool_bytes: int, tokens: int, more: int
) -> None:
    """Up to less than one block; a request that just fits prints its own length."""
    assert 0 <= pool_bytes - plan.blocks_in(pool_bytes) * plan.block_bytes < plan.block_bytes
    needed = plan.blocks_per_request(tokens)
    assert plan.state_blocks + -(-tokens // plan.block_tokens) <= needed <= plan.blocks_per_request(tokens + more)
    assert plan.bytes_per_request(tokens) == needed * plan.block_bytes
    assert (plan.concurrency(needed, tokens), plan.printed_tokens(needed, tokens)) == (1, tokens)


def test_a_block_of_states_alone_is_told_in_no_tokens() -> None:
    states, attention = spec("recurrent", 64), spec("attention", 16)
    assert plan_blocks([states], SETTINGS).holds == "one request's states"
    assert plan_blocks([states, attention], SETTINGS).holds == "400 tokens"
