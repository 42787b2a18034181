"""Block pools against what vLLM printed on other people's cards, sums done by hand, and laws for any layers."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.worlds import LAWS
from twin.errors import BadValue, Impossible
from twin.memory.block_pool import BlockPlan, CacheSpec, PoolSettings, plan_blocks
from twin.units import GIB

BF16, FP8, INT8, INT4, KVARN = 4096, 2048, 4 * 2 * (256 + 4), 4 * 2 * (128 + 4), 840
"""Bytes per token and attention layer of Qwen3.8-27B, 4 kv heads x 256, in each format."""
PINNED = 5_583_457_484
"""The pool of syv-ai's DFlash2 profiles, in bytes (`--kv-cache-memory`)."""

RULES = PoolSettings(
    promotes_sliding=True,
    balances_groups=True,
    speculative_tokens=0,
    prefix_caching=False,
    batched_tokens=2048,
    async_scheduling=True,
)


def gdn(k: int, *, layers: int = 48, element_bytes: int = 2) -> CacheSpec:
    """Gated DeltaNet of 48 heads of 128 x 128; the convolution keeps 3 + k rows of 10,240 channels in 16 bit."""
    state = 48 * 128 * 128 * element_bytes + 10_240 * 2 * (3 + k)
    return CacheSpec(kind="recurrent", layers=layers, state_bytes=state)


def attention(token_bytes: int, *, layers: int = 16) -> CacheSpec:
    """KVarN takes tiles of 128 tokens; that it takes no padding is inferred from its row below."""
    kvarn, block = token_bytes == KVARN, 128 if token_bytes == KVARN else 16
    return CacheSpec(
        kind="attention", layers=layers, token_bytes=token_bytes, kernel_block=block, takes_padding=not kvarn
    )


def drafter(token_bytes: int) -> CacheSpec:
    """DFlash2: 5 sliding layers of 8 kv heads x 128; beside KVarN it stays bf16 and takes blocks of 128."""
    per_token = {INT8: 8 * 2 * (128 + 4)}.get(token_bytes, 8 * 2 * 128 * 2)
    block = 128 if token_bytes == KVARN else 16
    return CacheSpec(kind="sliding", layers=5, token_bytes=per_token, window=2048, kernel_block=block)


def plan(token_bytes: int, k: int = 0, *, draft: str = "", element_bytes: int = 2, **rules: Any) -> BlockPlan:
    """Qwen3.8-27B; the layer of an MTP head is attention like the others."""
    extra = {"dflash2": [drafter(token_bytes)], "mtp": [attention(token_bytes, layers=1)]}.get(draft, [])
    specs = [attention(token_bytes), gdn(k, element_bytes=element_bytes), *extra]
    return plan_blocks(specs, replace(RULES, speculative_tokens=k, **rules))


CACHED: dict[str, Any] = {"prefix_caching": True}
D2: dict[str, Any] = {"draft": "dflash2"}
D2_15 = D2 | CACHED | {"async_scheduling": False}
MTP: dict[str, Any] = {"draft": "mtp"}
PLAIN = plan(BF16, 7, balances_groups=False, promotes_sliding=False, **D2)
"""DFlash2 on vLLM as it is."""

ROWS = {
    "bf16": (plan(BF16, 7, **D2), 65_536, (448, 8), PINNED, 380, (2 * 147, 6 * 8, 15), 69_758),
    "bf16, groups of 5": (PLAIN, 40_960, (448, 5), None, 513, (4 * 92, 10 * 8, 15), 45_383),
    "bf16 cached": (plan(BF16, 7, **D2, **CACHED), 65_536, (448, 8), PINNED, 380, (2 * 147, 6 * 9, 15), 68_605),
    "int8": (plan(INT8, 7, **D2), 131_072, (864, 8), PINNED, 382, (2 * 152, 6 * 8, 9), 138_696),
    "int8 cached": (plan(INT8, 7, **D2, **CACHED), 131_072, (864, 8), PINNED, 382, (2 * 152, 6 * 9, 9), 136_429),
    "bf16 k=15": (plan(BF16, 15, **D2_15), 57_344, (480, 8), PINNED, 354, (2 * 120, 6 * 17, 10), 57_669),
    "int8 k=15": (plan(INT8, 15, **D2_15), 114_224, (944, 8), PINNED, 350, (2 * 121, 6 * 17, 6), 114_224),
    "kvarn": (plan(KVARN, 7, **D2, **CACHED), 245_760, (2176, 8), 5_261_334_938, 359, (2 * 113, 6 * 9, 49), 268_169),
    "batch fp8": (plan(FP8), 150_000, (800, 16), None, 285, (188, 3, 0), 223_821),
    "batch fp8 cached": (plan(FP8, **CACHED), 150_000, (800, 16), None, 250, (188, 3 * 2, 0), 193_298),
    "mtp bf16": (plan(BF16, 4, **MTP), 65_536, (432, 17), None, 188, (152, 3 * 5, 0), 73_777),
    "mtp bf16 later": (plan(BF16, 4, **MTP), 65_536, (432, 17), None, 221, (152, 3 * 5, 0), 86_727),
    "mtp bf16 cached": (plan(BF16, 4, **MTP, **CACHED), 65_536, (432, 17), None, 188, (152, 3 * 6, 0), 72_475),
    "mtp fp8 cached": (plan(FP8, 3, **MTP, **CACHED), 150_000, (832, 17), None, 228, (181, 3 * 5, 0), 174_489),
    "mtp kvarn cached": (plan(KVARN, 3, **MTP, **CACHED), 200_000, (2048, 17), None, 165, (98, 3 * 5, 0), 292_035),
    "int4": (plan(INT4), 262_144, (1552, 16), None, 233, (169, 3, 0), 355_113),
    "int8 at 0.93": (plan(INT8), 150_000, (800, 16), None, 227, (188, 3, 0), 178_272),
    "fp8 at 0.93": (plan(FP8), 150_000, (800, 16), None, 209, (188, 3, 0), 164_136),
    "kvarn 4 slots": (plan(KVARN), 262_144, (2048, 16), None, 210, (128, 3, 0), 420_230),
}
"""syv-ai/qwen38-27b-rtx3090 on one RTX 3090: `max_model_len`, (block, g), pool bytes, blocks, blocks of a request in
attention, states and windows, tokens printed (the last four in thousands). Without a pool the blocks were solved from
the printed tokens: that they are whole is the check."""


@pytest.mark.parametrize("row", ROWS)
def test_a_printed_cache_size_follows_from_the_pool(row: str) -> None:
    cut, max_tokens, geometry, pool_bytes, blocks, parts, printed = ROWS[row]
    assert (cut.block_tokens, cut.group_layers) == geometry
    assert pool_bytes is None or cut.blocks_in(pool_bytes) == blocks
    held: Counter[str] = Counter()
    for group in cut.groups:
        held[group.kind] += group.blocks(max_tokens)
    assert (held["attention"], held["recurrent"], held["sliding"]) == parts
    assert cut.blocks_per_request(max_tokens) == sum(parts)
    assert cut.state_blocks == parts[1]
    assert cut.printed_tokens(blocks, max_tokens) == printed
    assert int(cut.concurrency(blocks, max_tokens) * max_tokens) == printed  # as vLLM rounds


@pytest.mark.parametrize(
    ("token_bytes", "blocks"),
    [
        (BF16, [400, 416, 432, 432, 448, 480]),
        (FP8, [800, 832, 848, 848, 880, 960]),
        (INT8, [800, 816, 832, 848, 864, 944]),
        (INT4, [1552, 1616, 1632, 1648, 1696, 1840]),
        (KVARN, [2048, 2048, 2048, 2176, 2176, 2432]),
    ],
)
def test_an_attention_block_covers_a_state_that_grows_with_the_draft(token_bytes: int, blocks: list[int]) -> None:
    assert [plan(token_bytes, k).block_tokens for k in (0, 3, 4, 5, 7, 15)] == blocks


MTP_ROWS = {
    FP8: (262_144, 9.28, 1600, 178, 265_122),
    INT8: (262_144, 9.67, 1584, 185, 272_453),
    INT4: (262_144, 9.67, 3104, 186, 502_667),
    BF16: (131_072, 9.67, 800, 186, 138_519),
}
"""malaiwah/qwen38-27b-exl3 receipts/kv-dtype-sweep-5090.json, fp32 state, k = 3; pools printed to 0.01 GiB."""


@pytest.mark.parametrize("token_bytes", MTP_ROWS)
def test_the_layer_of_an_mtp_head_makes_groups_of_17(token_bytes: int) -> None:
    max_tokens, pool_gib, block_tokens, blocks, printed = MTP_ROWS[token_bytes]
    cut = plan(token_bytes, 3, draft="mtp", element_bytes=4)
    assert (cut.block_tokens, cut.group_layers) == (block_tokens, 17)
    assert [group.layers for group in cut.groups] == [17, 16, 16, 16]
    assert {cut.blocks_in(int((pool_gib + off) * GIB)) for off in (-0.005, 0, 0.005)} == {blocks}
    assert cut.printed_tokens(blocks, max_tokens) == printed
    without = plan(token_bytes, 3, element_bytes=4)
    assert without.printed_tokens(without.blocks_in(int(pool_gib * GIB)), max_tokens) > 1.05 * printed


def test_a_refusal_names_what_a_request_needs_and_the_longest_that_fits() -> None:
    """The same 5090 at bf16, then the 3090 with DFlash2: unpatched int8 stops at 3,536 tokens, patched at 94,176."""
    cut = plan(BF16, 3, draft="mtp", element_bytes=4)
    assert cut.bytes_per_request(262_144) / GIB == pytest.approx(17.64, abs=0.005)
    assert cut.longest_request(cut.blocks_in(int(9.67 * GIB))) == 139_200
    assert plan(BF16, 7, **D2).bytes_per_request(262_144) / GIB == pytest.approx(16.88, abs=0.005)
    before, after = plan(INT8, 7, promotes_sliding=False, **D2), plan(INT8, 7, **D2)
    pool_bytes = before.bytes_per_request(3_536)
    assert before.longest_request(before.blocks_in(pool_bytes)) == 3_536
    assert after.longest_request(after.blocks_in(pool_bytes)) == 94_176
    assert plan(INT8, 15, **D2_15).longest_request(350) == 114_224  # the length that was served at concurrency 1.0


def test_an_int8_drafter_without_the_patch_fills_a_fiftieth_of_its_pages() -> None:
    cut = plan(INT8, 7, promotes_sliding=False, **D2)
    window = cut.groups[-1]
    assert (window.kind, window.layers, window.block_tokens, window.window) == ("sliding", 5, 16, 2048)
    assert window.reach_tokens == 2047 + 2 * 2048
    assert window.blocks(32_768) == 385
    assert (window.page_bytes, cut.page_bytes) == (16 * 2112, 864 * 2080) == (33_792, 1_797_120)
    assert window.page_bytes / cut.page_bytes == pytest.approx(0.0188, abs=5e-5)
    assert 385 * cut.block_bytes / GIB == pytest.approx(5.155, abs=5e-4)
    assert cut.blocks_per_request(32_768) == 2 * 38 + 48 + 385
    assert cut.bytes_per_request(32_768) / GIB == pytest.approx(6.815, abs=5e-4)


def test_a_promoted_block_makes_the_page_of_all_longer() -> None:
    cut = plan(INT8, 7, **D2)
    assert cut.page_bytes == 864 * 2112 == 1_824_768
    assert [group.block_tokens for group in cut.groups] == [864] * 2 + [0] * 6 + [864]
    assert [group.page_bytes for group in cut.groups] == [864 * 2080] * 2 + [1_777_664] * 6 + [1_824_768]
    assert plan(BF16, 7, **D2) == plan(BF16, 7, promotes_sliding=False, **D2)  # 28 pages of 16 fill one of 448 tokens


def test_nothing_is_promoted_past_a_page_that_can_have_no_gap() -> None:
    """The drafter beside KVarN keeps its block of 128 (49 blocks of a request, not 13), and its page gets the gap."""
    cut = plan(KVARN, 7, **D2)
    assert (cut.page_bytes, cut.groups[-1].page_bytes, cut.groups[-1].block_tokens) == (2176 * 840, 128 * 4096, 128)
    padded = [replace(attention(KVARN), takes_padding=True), gdn(7), drafter(KVARN)]
    assert plan_blocks(padded, replace(RULES, speculative_tokens=7)).page_bytes == 512 * 4096


@pytest.mark.parametrize(
    ("layers", "balances", "full", "groups"),
    [
        ((16, 48, 5), True, 8, [8, 8] + [8] * 6 + [5]),
        ((16, 48, 5), False, 5, [4] * 4 + [5] * 8 + [4] * 2 + [5]),
        ((16, 48, 8), True, 16, [16] + [16] * 3 + [8]),
        ((16, 48, 4), True, 8, [8, 8] + [8] * 6 + [4]),
        ((16, 48, 3), True, 4, [4] * 4 + [4] * 12 + [3]),
        ((17, 48, 5), True, 5, [5, 4, 4, 4] + [5] * 8 + [4] * 2 + [5]),
        ((10, 0, 20), True, 10, [10, 10, 10]),
        ((13, 0, 12), True, 13, [13, 12]),
        ((12, 0, 8), False, 8, [6, 6, 8]),
        ((16, 48, 0), True, 16, [16] * 4),
    ],
)
def test_groups_are_as_long_as_the_fewest_layers_of_a_type_unless_padding_windows_is_cheaper(
    layers: tuple[int, int, int], *, balances: bool, full: int, groups: list[int]
) -> None:
    every = (attention(BF16), gdn(0), drafter(BF16))
    specs = [replace(spec, layers=count) for spec, count in zip(every, layers, strict=True) if count]
    cut = plan_blocks(specs, replace(RULES, balances_groups=balances))
    assert cut.group_layers == full
    assert sorted(group.layers for group in cut.groups) == sorted(groups)


def test_short_requests_take_a_block_and_three_states() -> None:
    fp8, kvarn, fp32_state = plan(FP8), plan(KVARN), plan(FP8, element_bytes=4)
    assert divmod(285, fp8.blocks_per_request(640)) == (71, 1)
    assert divmod(151, kvarn.blocks_per_request(640)) == (37, 3)
    assert divmod(fp32_state.blocks_in(285 * fp8.block_bytes), fp32_state.blocks_per_request(640)) == (36, 1)


def test_a_state_in_fp32_doubles_the_block() -> None:
    cut = plan(FP8, element_bytes=4)
    assert (cut.block_tokens, cut.page_bytes) == (1568, 3_211_264)
    for token_bytes, block_tokens in ((2048, 1600), (1024, 3184)):  # Qwen3.8-Flash-Next, k = 2: vllm issue 54426
        specs = [attention(token_bytes, layers=12), gdn(2, layers=36, element_bytes=4)]
        assert plan_blocks(specs, RULES).block_tokens == block_tokens


def test_a_dense_model_has_one_group_of_the_kernels_own_blocks() -> None:
    cut = plan_blocks([attention(4096, layers=32)], replace(RULES, speculative_tokens=4))
    assert (cut.block_tokens, cut.group_layers, len(cut.groups), cut.state_blocks) == (16, 32, 1, 0)
    assert cut.block_bytes == 16 * 32 * 4096
    assert [cut.blocks_per_request(tokens) for tokens in (1, 16, 17, 8192)] == [1, 1, 2, 512]
    assert cut.longest_request(512) == 8192
    assert plan_blocks([attention(KVARN)], RULES).block_tokens == 128


def test_layers_that_cannot_share_a_pool_are_refused() -> None:
    odd = replace(drafter(INT8), takes_padding=False)
    with pytest.raises(Impossible, match="sliding layers neither divides 1,664,000 B"):
        plan_blocks([attention(INT8), gdn(0), odd], replace(RULES, promotes_sliding=False))
    for specs in ([gdn(0)], [attention(BF16), attention(FP8)]):
        with pytest.raises(Impossible, match="exactly 1"):
            plan_blocks(specs, RULES)


@pytest.mark.parametrize(
    "wrong", [{"layers": 0}, {"token_bytes": 0}, {"token_bytes": -1}, {"state_bytes": 1}, {"kernel_block": 0}]
)
def test_a_spec_of_sizes_that_its_kind_has_not_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadValue, match=f"{next(iter(wrong))} of attention layers"):
        replace(attention(BF16), **wrong)


def test_empty_requests_and_steps_are_refused() -> None:
    with pytest.raises(BadValue, match="at least 1 token"):
        plan(BF16).blocks_per_request(0)
    for wrong in ({"speculative_tokens": -1}, {"batched_tokens": 0}):
        with pytest.raises(BadValue, match="at least"):
            replace(RULES, **wrong)


COUNT, SIZE = st.integers(1, 64), st.integers(1, 8192)
UNIT = st.sampled_from([16, 64, 128])
FULL = st.builds(CacheSpec, kind=st.just("attention"), layers=COUNT, token_bytes=SIZE, kernel_block=UNIT)
STATE = st.builds(CacheSpec, kind=st.just("recurrent"), layers=COUNT, state_bytes=st.integers(1, 2**23))
WINDOW = st.builds(CacheSpec, kind=st.just("sliding"), layers=COUNT, token_bytes=SIZE, window=SIZE, kernel_block=UNIT)
SPECS = st.tuples(FULL, st.lists(STATE, max_size=1), st.lists(WINDOW, max_size=2)).map(
    lambda drawn: [drawn[0], *drawn[1], *drawn[2]]
)
ANY_RULES = st.builds(
    PoolSettings,
    promotes_sliding=st.booleans(),
    balances_groups=st.booleans(),
    speculative_tokens=st.integers(0, 16),
    prefix_caching=st.booleans(),
    batched_tokens=SIZE,
    async_scheduling=st.booleans(),
)
PLANS = st.builds(plan_blocks, SPECS, ANY_RULES)


@LAWS
@given(SPECS, ANY_RULES)
def test_every_layer_lies_in_one_group_and_every_page_fits(specs: list[CacheSpec], rules: PoolSettings) -> None:
    cut = plan_blocks(specs, rules)
    layers: Counter[str] = Counter()
    for group in cut.groups:
        layers[group.kind] += group.layers
        assert group.page_bytes <= cut.page_bytes
        assert group.layers * group.page_bytes <= cut.block_bytes
    for kind in ("attention", "recurrent", "sliding"):
        assert layers[kind] == sum(spec.layers for spec in specs if spec.kind == kind)
    assert max(group.layers for group in cut.groups) == cut.group_layers


@LAWS
@given(FULL, STATE, WINDOW, ANY_RULES)
def test_a_promoted_window_fills_more_than_half_of_its_page(
    full: CacheSpec, state: CacheSpec, window: CacheSpec, rules: PoolSettings
) -> None:
    cut = plan_blocks([full, state, window], replace(rules, promotes_sliding=True))
    assert all(2 * group.page_bytes > cut.page_bytes for group in cut.groups if group.kind != "recurrent")


@LAWS
@given(PLANS, st.integers(0, 2**40))
def test_blocks_fill_a_pool_up_to_less_than_one_more(cut: BlockPlan, pool_bytes: int) -> None:
    assert 0 <= pool_bytes - cut.blocks_in(pool_bytes) * cut.block_bytes < cut.block_bytes


@LAWS
@given(PLANS, st.integers(1, 2**20), st.integers(0, 2**20))
def test_a_longer_request_never_takes_fewer_blocks(cut: BlockPlan, tokens: int, more: int) -> None:
    needed = cut.blocks_per_request(tokens)
    assert needed <= cut.blocks_per_request(tokens + more)
    assert cut.bytes_per_request(tokens) == needed * cut.block_bytes
    assert needed >= cut.state_blocks + -(-tokens // cut.block_tokens)


@LAWS
@given(PLANS, st.integers(0, 10_000))
def test_one_token_more_than_the_longest_request_does_not_fit(cut: BlockPlan, blocks: int) -> None:
    longest = cut.longest_request(blocks)
    assert longest == 0 or cut.blocks_per_request(longest) <= blocks
    assert cut.blocks_per_request(longest + 1) > blocks


@LAWS
@given(PLANS, st.integers(1, 2**20))
def test_a_request_that_just_fits_prints_its_own_length(cut: BlockPlan, tokens: int) -> None:
    blocks = cut.blocks_per_request(tokens)
    assert cut.concurrency(blocks, tokens) == 1
    assert cut.printed_tokens(blocks, tokens) == tokens <= cut.longest_request(blocks)
