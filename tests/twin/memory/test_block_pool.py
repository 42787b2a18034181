"""Block pools against what vLLM printed on other people's cards, and their parts by hand."""

import math
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from hwprofiles import load_profile
from hwprofiles.rates import Rate
from tests.twin.memory.pool_worlds import BATCH, FAST, LLAMA, RTX3090, asked, configured, planned, pool, pool_of
from tests.worlds import machine
from twin.ask.question import Question
from twin.ask.resolve import on_machine, resolve
from twin.engines import load_engine
from twin.errors import Impossible
from twin.memory import block_pool
from twin.memory.block_pool import block_plan
from twin.memory.plan import plan_memory
from twin.memory.startup import startup_parts
from twin.units import GIB, MAX_TOKENS, MIB, format_bytes

VRAM_BYTES = RTX3090.gpu.vram.value
VLLM = load_engine("vllm")
POOL = VLLM.block_pool
assert POOL is not None

INT8, KVARN, TURBO = "int8_per_token_head", "kvarn_k4v2_g128", "turboquant_4bit_nc"
PINNED = 5_583_457_484
"""The pool of syv-ai's DFlash2 profiles, in bytes (`--kv-cache-memory`)."""


def q(kv_dtype: str, speculation: str = "", **more: Any) -> dict[str, Any]:
    """A question about the single-user checkpoint, in the published lane's words."""
    drafting = {"speculation": speculation, "accepted": 1.0} if speculation else {}
    return {"model": FAST, "kv_dtype": kv_dtype, **drafting, **more}


D7, D15, CACHED = "dflash2:7", "dflash2:15", {"prefix_caching": True}
TWO, EIGHT = {"max_sequences": 2}, {"max_sequences": 8}
SERVER = {"max_sequences": 64, "graph_tokens": 64}
"""The flags of syv-ai's batch server."""
LONG = CACHED | {"async_scheduling": False}
FP32 = {"state_dtype": "fp32"}
Row = tuple[dict[str, Any], int, tuple[int, int], int | None, int, tuple[int, int, int], int]
PUBLISHED: dict[str, Row] = {
    "bf16": (q("bf16", D7), 65_536, (448, 8), PINNED, 380, (2 * 147, 6 * 8, 15), 69_758),
    "bf16, stock": (q("bf16", D7, patched=False), 40_960, (448, 5), None, 513, (4 * 92, 10 * 8, 15), 45_383),
    "bf16 cached": (q("bf16", D7, **CACHED), 65_536, (448, 8), PINNED, 380, (2 * 147, 6 * 9, 15), 68_605),
    "int8": (q(INT8, D7), 131_072, (864, 8), PINNED, 382, (2 * 152, 6 * 8, 9), 138_696),
    "bf16 k=15": (q("bf16", D15, **LONG), 57_344, (480, 8), PINNED, 354, (2 * 120, 6 * 17, 10), 57_669),
    "int8 k=15": (q(INT8, D15, **LONG), 114_224, (944, 8), PINNED, 350, (2 * 121, 6 * 17, 6), 114_224),
    "kvarn": (q(KVARN, D7, **CACHED, **TWO), 245_760, (2176, 8), 5_261_334_938, 359, (2 * 113, 6 * 9, 49), 268_169),
    "batch fp8": (q("fp8"), 150_000, (800, 16), None, 285, (188, 3, 0), 223_821),
    "batch fp8 cached": (q("fp8", **CACHED), 150_000, (800, 16), None, 250, (188, 3 * 2, 0), 193_298),
    "mtp bf16": (q("bf16", "mtp:4"), 65_536, (432, 17), None, 188, (152, 3 * 5, 0), 73_777),
    "mtp bf16 cached": (q("bf16", "mtp:4", **CACHED), 65_536, (432, 17), None, 188, (152, 3 * 6, 0), 72_475),
    "mtp fp8 cached": (q("fp8", "mtp:3", **CACHED), 150_000, (832, 17), 6_604_455_936, 228, (181, 15, 0), 174_489),
    "mtp kvarn": (q(KVARN, "mtp:3", **CACHED, **EIGHT), 200_000, (2048, 17), 4_825_497_600, 165, (98, 15, 0), 292_035),
    "int4": (q("int4_per_token_head"), 262_144, (1552, 16), None, 233, (169, 3, 0), 355_113),
    "kvarn 4 slots": (q(KVARN), 262_144, (2048, 16), None, 210, (128, 3, 0), 420_230),
    "mtp fp8, fp32 state": (q("fp8", "mtp:3", **FP32), 262_144, (1600, 17), None, 178, (164, 12, 0), 265_122),
    "mtp bf16, fp32 state": (q("bf16", "mtp:3", **FP32), 131_072, (800, 17), None, 186, (164, 12, 0), 138_519),
}
"""syv-ai/qwen38-27b-rtx3090 on one RTX 3090, and with fp32 states malaiwah/qwen38-27b-exl3 on a 5090: question, longest
request, (block, g), pool bytes, blocks, blocks of a request in attention, states and windows, tokens printed. Without
pool bytes the blocks were solved from the printed tokens: that they are whole is the check."""


@pytest.mark.parametrize("row", PUBLISHED)
def test_a_printed_cache_size_follows_from_the_pool(row: str) -> None:
    """An attention block covers a state, of 1,572,864 B and 20,480 B of its convolution for each of 3 + k rows."""
    question, longest, geometry, pool_bytes, blocks, parts, printed = PUBLISHED[row]
    case = asked(longest, **question)
    plan = block_plan(case)
    assert (plan.block_tokens, plan.group_layers) == geometry
    held: Counter[str] = Counter()
    for group in plan.groups:
        held[group.kind] += group.blocks(longest)
    assert (held["attention"], held["recurrent"], held["sliding"]) == parts
    assert plan.blocks_per_request(longest) == sum(parts)
    assert plan.state_blocks == parts[1]
    drafts = case.speculation.tokens if case.speculation else 0
    state_bytes = 786_432 * case.state_element_bytes + 20_480 * (3 + drafts)
    assert {group.page_bytes for group in plan.groups if group.kind == "recurrent"} == {state_bytes}
    assert plan.printed_tokens(blocks, longest) == printed
    assert int(plan.concurrency(blocks, longest) * longest) == printed  # as vLLM rounds
    if pool_bytes is not None:  # whatever context is asked about
        found = pool(1, max_model_tokens=longest, pool_bytes=pool_bytes, **question)
        assert (found.blocks, found.printed_tokens, found.concurrency) == (blocks, printed, blocks / sum(parts))


def test_published_refusals_name_what_a_request_needs_and_the_longest_that_fits() -> None:
    """The 5090 at bf16, then the 3090 with DFlash2: stock int8 stops at 3,536 tokens, patched at 94,176."""
    fp32 = block_plan(asked(**q("bf16", "mtp:3", **FP32)))
    before, after = (block_plan(asked(**q(INT8, D7, promotes_windows=told))) for told in (False, True))
    needed = [fp32.bytes_per_request(262_144), before.bytes_per_request(32_768)]
    needed.append(block_plan(asked(**q("bf16", D7))).bytes_per_request(262_144))
    assert [size / GIB for size in needed] == pytest.approx([17.64, 6.815, 16.88], abs=0.005)
    assert {fp32.blocks_in(int((9.67 + off) * GIB)) for off in (-0.005, 0, 0.005)} == {186}  # printed to 0.01 GiB
    pool_bytes = before.bytes_per_request(3_536)
    for plan, blocks, longest in (
        (fp32, 186, 139_200),
        (before, before.blocks_in(pool_bytes), 3_536),
        (after, after.blocks_in(pool_bytes), 94_176),
    ):
        assert plan.blocks_per_request(longest) <= blocks < plan.blocks_per_request(longest + 1)


def test_a_drafters_windows_fill_a_fiftieth_of_their_pages_until_their_block_is_promoted() -> None:
    """Promoted, they make the page of all longer; beside KVarN, whose page may have no gap, they are not."""
    before, after = (block_plan(asked(**q(INT8, D7, promotes_windows=told))) for told in (False, True))
    window = before.groups[-1]
    assert (window.kind, window.layers, window.block_tokens) == ("sliding", 5, 16)
    assert (window.reach_tokens, window.blocks(32_768)) == (2047 + 2 * 2048, 385)
    assert (window.page_bytes, before.page_bytes) == (16 * 2112, 864 * 2080)
    assert [group.block_tokens for group in after.groups] == [864] * 2 + [0] * 6 + [864]
    assert [group.page_bytes for group in after.groups] == [864 * 2080] * 2 + [1_777_664] * 6 + [after.page_bytes]
    kvarn = block_plan(asked(**q(KVARN, D7)))
    assert (after.page_bytes, kvarn.page_bytes) == (864 * 2112, 2176 * 840)
    assert (kvarn.groups[-1].page_bytes, kvarn.groups[-1].block_tokens) == (128 * 4096, 128)


@pytest.mark.parametrize(
    ("question", "block_tokens", "layers", "blocks"),
    [
        ({"model": LLAMA}, 16, (32, 0, 0), [1, 1, 2, 512]),
        ({"model": LLAMA, "kv_dtype": KVARN}, 128, (32, 0, 0), [1, 1, 1, 64]),
        (q("bf16", "mtp:3"), 416, (17, 48, 0), [13, 13, 13, 32]),
        (q("bf16", D7), 448, (16, 48, 5), [52, 52, 52, 101]),
    ],
)
def test_a_drafters_layers_join_attention_unless_they_slide(
    question: dict[str, Any], block_tokens: int, layers: tuple[int, int, int], blocks: list[int]
) -> None:
    plan = block_plan(asked(**question))
    kinds = ("attention", "recurrent", "sliding")
    assert tuple(sum(group.layers for group in plan.groups if group.kind == kind) for kind in kinds) == layers
    assert plan.block_tokens == block_tokens
    assert [plan.blocks_per_request(tokens) for tokens in (1, 16, 17, 8192)] == blocks


def test_the_pools_of_a_batch_server_come_out_near_what_was_published() -> None:
    """fp8 at 0.972: 285 blocks warm, 250 cold with prefix caching; KVarN at 0.93: 210 with 4 slots, 172 with 64."""
    kvarn: dict[str, Any] = {"kv_dtype": KVARN, "utilisation": 0.93}
    warm, cold = (
        pool(150_000, kv_dtype="fp8", utilisation=0.972, **SERVER, **more)
        for more in ({}, {"prefix_caching": True, "cold_start": True})
    )
    few, many = (pool(262_144, **kvarn, **SERVER | {"max_sequences": sequences}) for sequences in (4, 64))
    assert [each.blocks for each in (warm, cold, few, many)] == pytest.approx([285, 250, 210, 172], abs=3)
    assert warm.pool_bytes - cold.pool_bytes == pytest.approx(POOL.startup.compiler.value, abs=1)
    turbo = pool(262_144, utilisation=0.972, kv_dtype=TURBO, **SERVER)
    assert (turbo.plan.block_tokens, turbo.printed_tokens) == (1568, pytest.approx(413_000, rel=0.015))


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_a_pool_is_what_utilisation_leaves_of_the_device(backend: str) -> None:
    """0.93 of 23.56 GiB, less weights, embedding, what the start-up takes and what FlashInfer keeps for itself."""
    case = asked(150_000, kv_dtype="fp8", backend=backend, utilisation=0.93)
    sizes = case.model.weight_bytes
    plan = plan_memory(case, RTX3090)
    device, outside, _ = plan.memories
    assert device.capacity_bytes == pytest.approx(0.93 * VRAM_BYTES)
    assert outside.capacity_bytes == pytest.approx(0.07 * VRAM_BYTES)
    before = {"weights": sum(sizes.values()) - sizes["embedding"], "embedding": sizes["embedding"]}
    before |= {name: part.value for name, part in startup_parts(case, RTX3090.gpu).items()}
    assert ("backend workspace" in before) is (backend == "flashinfer")
    assert {name: device.fixed.get(name, 0) for name in before} == before
    assert pool_of(plan).pool_bytes == int(device.capacity_bytes - sum(before.values()))
    assert device.fixed.keys() - before.keys() == {"null block", "state and windows"}


@pytest.mark.parametrize("kv_dtype", [name for name in VLLM.formats if name != "fp8_per_token_head"])
@pytest.mark.parametrize("model", [BATCH, LLAMA])
def test_a_pool_of_given_bytes_is_there_only_where_the_device_holds_it(model: str, kv_dtype: str) -> None:
    """It is taken whole, after weights and buffers: a byte more than is left, and no context at all fits."""
    about: dict[str, Any] = {"model": model, "kv_dtype": kv_dtype, "utilisation": 0.5, **EIGHT}
    before = sum(block_pool.fixed_parts(asked(**about), RTX3090).values())
    room = int(VRAM_BYTES - before)
    held, refused = (planned(**about, pool_bytes=size) for size in (room, room + 1))
    assert pool_of(held).blocks == room // pool_of(held).plan.block_bytes
    assert held.memories[0].used_bytes(held.pages) == pytest.approx(before + room)
    assert held.memories[0].capacity_spread == 0
    assert (pool_of(refused).blocks, refused.max_ctx_tokens(), refused.fits) == (0, 0, False)
    for plan in (held, refused):
        assert sum(memory.capacity_bytes for memory in plan.devices()) == pytest.approx(VRAM_BYTES)


@pytest.mark.parametrize("pool_bytes", [30 * GIB, 2**50])
def test_what_is_short_is_the_pool_and_all_beside_it_less_the_device(pool_bytes: int) -> None:
    needed = sum(block_pool.fixed_parts(asked(kv_dtype="bf16"), RTX3090).values()) + pool_bytes
    missing = format_bytes(math.ceil(needed - VRAM_BYTES))
    text = f"needs {format_bytes(needed)} of VRAM, the machine has 23.56 GiB ({missing} short)"
    assert planned(1024, kv_dtype="bf16", pool_bytes=pool_bytes).shortage() == text


@pytest.mark.parametrize(
    ("kv_dtype", "sequences", "slots", "slot_mib", "longest", "tokens"),
    [
        (KVARN, 64, 152, 8, 1000, 64_000), (KVARN, 4, 32, 8, 262_144, 262_144), (KVARN, 1, 26, 8, 1000, 4096),
        (KVARN, 1, 26, 8, 400_000, 262_144), ("kvarn_k4v2_g64", 64, 168, 4, 1000, 64_000),
    ],
)  # fmt: skip
def test_waiting_tiles_take_2_slots_a_sequence_those_of_a_step_and_8_and_a_rebuilt_history_4_kib_a_token(
    kv_dtype: str, sequences: int, slots: int, slot_mib: int, *, longest: int, tokens: int
) -> None:
    """A slot is a tile of K and V in 16 bits over 16 layers: 64 seats take 1.19 GiB.

    The history of all sequences at their longest: of 4,096 to 262,144 tokens, 1 GiB at most, shared by the layers.
    """
    fixed = planned(1, kv_dtype=kv_dtype, max_sequences=sequences, max_model_tokens=longest).memories[0].fixed
    assert fixed["unquantised tiles"] == slots * slot_mib * MIB
    assert fixed["prefill scratch"] == tokens * 4096


@pytest.mark.parametrize(
    ("ctx_tokens", "utilisation", "fits"),
    [(32_768, 0.972, False), (131_072, 0.9, False), (8192, 0.972, True), (65_536, 0.9, True)],
)
def test_turboquant_runs_out_of_memory_where_it_was_seen_to(ctx_tokens: int, utilisation: float, *, fits: bool) -> None:
    """In scratch that the profile does not see: the pool itself would hold the request several times over.

    One copy of K and V of the longest request in 16 bits lies inside the profile, the fitted copies outside.
    """
    plan = planned(ctx_tokens, utilisation=utilisation, kv_dtype=TURBO, max_model_tokens=131_072, **SERVER)
    assert plan.fits is fits
    if not fits:
        assert [short.name for short in plan.short()] == ["gpu0 outside the engine's share"]
        assert pool_of(plan).concurrency > 2
    device, outside, _ = plan.memories
    assert device.fixed["prefill scratch"] == 0.5 * GIB
    copies = POOL.dequantises_prefix["turboquant"].value
    assert block_pool.scratch_token_bytes(asked(kv_dtype=TURBO)) == copies * 4096
    assert outside.page_bytes["prefill scratch"] == copies * 4096 * pool_of(plan).plan.block_tokens


@pytest.mark.parametrize(
    ("question", "drafter_bytes", "graphs"),
    [
        ({}, 0, None),
        ({"cold_start": True}, 0, None),
        ({"kv_dtype": "fp8"}, 0, None),
        ({"speculation": "mtp:3", "accepted": 1.0}, 215e6 + 108e6, None),
        ({"speculation": "dflash2:7", "accepted": 1.0}, 1.19e9, POOL.draft_graphs),
        ({"speculation": "dflash2:8", "accepted": 1.0}, 1.19e9, POOL.long_draft_graphs),
    ],
)
def test_a_block_drafter_takes_weights_and_graphs_and_each_spread_counts(
    question: dict[str, Any], drafter_bytes: float, graphs: Rate | None
) -> None:
    """Its graphs take 1.4 GiB, or 1.9 where drafts are longer than its block; spreads add in squares."""
    device = planned(model=FAST, **question).memories[0]
    assert device.fixed.get("drafter", 0) == drafter_bytes
    taken = startup_parts(asked(model=FAST, **question), RTX3090.gpu)
    assert graphs is None or taken["graphs"] == graphs
    spread = math.hypot(*(part.deviation for part in taken.values()), RTX3090.gpu.vram.deviation)
    assert device.capacity_spread == pytest.approx(spread)


@pytest.mark.parametrize(("blocks", "residents"), [(285, 71), (4, 0), (5, 1)])
def test_the_engine_prints_one_block_more_than_it_can_use(blocks: int, residents: int) -> None:
    """Its null block: 285 blocks hold 71 short requests of 4, not 71.25; a batch shares all the others."""
    found = pool(640, kv_dtype="fp8", pool_bytes=blocks * 26_214_400, **SERVER)
    assert (found.blocks, max(0, found.blocks - 1) // found.plan.blocks_per_request(640)) == (blocks, residents)
    for batch in (1, 3):
        about: dict[str, Any] = {"pool_bytes": blocks * 26_214_400, "batch": batch, "utilisation": 0.5}
        plan = planned(kv_dtype="fp8", **about, **SERVER)
        assert plan.max_ctx_tokens() == max(0, (blocks - 1) // batch - 3) * 800


def test_engines_without_a_pool_are_refused_and_without_room_there_is_none() -> None:
    for model in (BATCH, LLAMA):  # whose weights alone do not fit
        plan = plan_memory(asked(model=model), machine(vram_bytes=8 * GIB))
        assert (plan.fits, plan.max_ctx_tokens()) == (False, 0)
        assert (pool_of(plan).pool_bytes, pool_of(plan).blocks, pool_of(plan).printed_tokens) == (0, 0, 0)
    other = resolve(Question(ctx_tokens=1))
    for wanted in (block_plan, block_pool.pool_rules):
        with pytest.raises(Impossible, match="exllamav3 shares no pool of blocks among requests"):
            wanted(other)


@pytest.mark.parametrize(
    ("share", "starts"), [({"utilisation": 0.75}, True), ({"pool_bytes": 2 * GIB}, True), ({"utilisation": 0.9}, False)]
)
def test_what_the_host_keeps_takes_from_what_an_engine_leaves_of_one_memory(
    share: dict[str, Any], *, starts: bool
) -> None:
    """4 GiB are reserved: 0.9 of 23.56 leaves 2.36, and the engine does not start."""
    case = asked(8192, **share)
    memory = replace(RTX3090.host.memory, value=VRAM_BYTES)
    host, gpu = replace(RTX3090.host, memory=memory), replace(RTX3090.gpu, unified_memory=True)
    apart, plan = plan_memory(case, RTX3090), plan_memory(case, replace(RTX3090, host=host, gpu=gpu))
    device, rest = plan.memories
    assert device == apart.memories[0]
    assert device.capacity_bytes + rest.capacity_bytes == pytest.approx(VRAM_BYTES)
    assert rest.fixed == apart.memories[1].fixed | apart.memories[2].fixed
    assert (apart.fits, plan.fits, pool_of(plan).blocks > 0) == (True, starts, starts)
    assert ("of memory" in plan.shortage()) is not starts


H200 = load_profile("h200")


@pytest.mark.parametrize("ctx_tokens", [100, 4096, 100_000])
def test_windows_take_blocks_as_far_as_the_context_fills_them(ctx_tokens: int) -> None:
    """Gemma 3 12B: one group of attention and five of windows of 1,024 tokens, 2 x 8,192 of them in flight."""
    plan = plan_memory(on_machine(configured("gemma-3-12b", ctx_tokens=ctx_tokens, batch=3), H200), H200)
    found = pool_of(plan).plan
    assert found.block_bytes == 8 * 16 * 8192
    window = -(-min(1023 + 2 * 8192, ctx_tokens) // 16) + 1
    parts = plan.memories[0].parts(plan.pages)
    assert parts["state and windows"] == 3 * 5 * window * found.block_bytes
    assert parts["kv cache"] == 3 * -(-ctx_tokens // 16) * found.block_bytes


@pytest.mark.parametrize("name", ["gemma-3-12b", "gemma-4-31b-nvfp4", "jamba-v0.1", "falcon-h1-7b", "gpt-oss-20b"])
def test_the_longest_context_is_the_last_whose_blocks_are_there(name: str) -> None:
    plan = plan_memory(on_machine(configured(name, batch=5, utilisation=0.85), H200), H200)
    longest, found = plan.max_ctx_tokens(), pool_of(plan)
    blocks = [found.plan.blocks_per_request(tokens) for tokens in (longest, longest + found.plan.block_tokens)]
    assert 5 * blocks[0] < found.blocks <= 5 * blocks[1]


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "mamba-codestral-7b"])
def test_a_cache_that_stops_growing_has_no_longest_context(name: str) -> None:
    plan = plan_memory(on_machine(configured(name, ctx_tokens=100_000), H200), H200)
    assert plan.max_ctx_tokens() == MAX_TOKENS
    held = pool_of(plan).plan.blocks_per_request(100_000) * pool_of(plan).plan.block_bytes
    assert plan.memories[0].parts(plan.pages)["state and windows"] == held


def test_a_vision_tower_lies_beside_the_language_model_in_16_bits() -> None:
    case = configured("qwen3-vl-8b")
    assert block_pool.fixed_parts(case, H200)["vision tower"] == 2 * case.model.towers["vision"] == 1_152_776_672
    assert "mtp tower" not in block_pool.fixed_parts(configured("deepseek-v3"), H200)
    assert configured("deepseek-v3").model.towers["mtp"] > 0


def test_a_longer_step_keeps_more_of_windows() -> None:
    """`--chunk` is the most tokens of a step."""
    short, long = (block_plan(configured("gemma-3-12b", chunk_tokens=tokens)) for tokens in (1024, 8192))
    assert long.held_blocks(10**6) - short.held_blocks(10**6) == 5 * 2 * (8192 - 1024) // 16
