"""The pool of blocks of a whole question: published pools to the token, and its parts by hand."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.twin.memory.pool_worlds import BATCH, FAST, LLAMA, RTX3090, asked, planned, pool, pool_of
from tests.worlds import machine
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.engines import load_engine
from twin.errors import Impossible
from twin.memory.block_pool import block_plan, fixed_parts, pool_rules, scratch_token_bytes
from twin.memory.plan import plan_memory
from twin.operations.counts import embedding_bytes, head_bytes, layer_parameters, state_bytes, weight_bytes
from twin.units import GIB, MIB, format_bytes

VRAM_BYTES = RTX3090.gpu.vram.value
VLLM = load_engine("vllm")
POOL = VLLM.block_pool
assert POOL is not None

PINNED = {"pool_bytes": 5_583_457_484}
K7: dict[str, Any] = {"model": FAST, "speculation": "dflash2:7", "accepted": 2.0} | PINNED
K15 = K7 | {"speculation": "dflash2:15", "prefix_caching": True, "async_scheduling": False}
HUGE = K7 | {"kv_dtype": "kvarn_k4v2_g128", "pool_bytes": 5_261_334_938, "prefix_caching": True, "max_sequences": 2}
MTP: dict[str, Any] = {"model": FAST, "speculation": "mtp:3", "accepted": 2.5, "prefix_caching": True}

PUBLISHED: dict[str, tuple[int, dict[str, Any], tuple[int, int, int], int]] = {
    "dflash2 bf16": (65_536, K7 | {"kv_dtype": "bf16"}, (448, 380, 357), 69_758),
    "dflash2 bf16 cached": (65_536, K7 | {"kv_dtype": "bf16", "prefix_caching": True}, (448, 380, 363), 68_605),
    "dflash2 int8": (131_072, K7 | {"kv_dtype": "int8_per_token_head"}, (864, 382, 361), 138_696),
    "dflash2 int8 cached": (
        131_072,
        K7 | {"kv_dtype": "int8_per_token_head", "prefix_caching": True},
        (864, 382, 367),
        136_429,
    ),
    "dflash2 bf16 k=15": (57_344, K15 | {"kv_dtype": "bf16"}, (480, 354, 352), 57_669),
    "dflash2 int8 k=15": (114_224, K15 | {"kv_dtype": "int8_per_token_head"}, (944, 350, 350), 114_224),
    "dflash2 kvarn cached": (245_760, HUGE, (2176, 359, 329), 268_169),
    "mtp fp8 cached": (150_000, MTP | {"kv_dtype": "fp8", "pool_bytes": 6_604_455_936}, (832, 228, 196), 174_489),
    "mtp kvarn cached": (
        200_000,
        MTP | {"kv_dtype": "kvarn_k4v2_g128", "pool_bytes": 4_825_497_600},
        (2048, 165, 113),
        292_035,
    ),
}
"""syv-ai/qwen38-27b-rtx3090, pools given in bytes: longest request, question, (block, blocks, of a request), tokens."""


@pytest.mark.parametrize("row", PUBLISHED)
def test_a_pool_of_given_bytes_prints_the_published_tokens(row: str) -> None:
    longest, question, (block_tokens, blocks, of_request), printed = PUBLISHED[row]
    found = pool(longest, **question)
    assert (found.plan.block_tokens, found.blocks) == (block_tokens, blocks)
    assert found.plan.blocks_per_request(longest) == of_request
    assert found.printed_tokens == printed
    assert found.concurrency == blocks / of_request


@pytest.mark.parametrize("row", PUBLISHED)
def test_what_is_printed_hangs_on_the_longest_request_and_not_on_the_context(row: str) -> None:
    longest, question, _, printed = PUBLISHED[row]
    assert pool(1, max_model_tokens=longest, **question).printed_tokens == printed


def test_the_pools_of_a_batch_server_come_out_near_what_was_published() -> None:
    """fp8 at 0.972: 285 blocks warm, 250 cold with prefix caching; KVarN at 0.93: 210 with 4 slots, 172 with 64."""
    fp8: dict[str, Any] = {"kv_dtype": "fp8", "utilisation": 0.972}
    kvarn: dict[str, Any] = {"kv_dtype": "kvarn_k4v2_g128", "utilisation": 0.93}
    blocks = [
        pool(150_000, **fp8).blocks,
        pool(150_000, **fp8, prefix_caching=True, cold_start=True).blocks,
        pool(262_144, **kvarn, max_sequences=4).blocks,
        pool(262_144, **kvarn, max_sequences=64).blocks,
    ]
    assert blocks == pytest.approx([285, 250, 210, 172], abs=3)


def test_a_pool_is_what_utilisation_leaves_of_the_device() -> None:
    """0.93 of 23.56 GiB, less weights, embedding, transient, graphs and what FlashInfer keeps."""
    case = asked(150_000, kv_dtype="fp8", utilisation=0.93)
    spec = case.model
    in_layers = sum(layer_parameters(spec, kind) for kind in spec.layer_kinds)
    device, outside, _ = plan_memory(case, RTX3090).memories
    assert device.capacity_bytes == pytest.approx(0.93 * VRAM_BYTES)
    assert device.fixed["weights"] == weight_bytes(spec, in_layers) + head_bytes(spec)
    assert device.fixed["embedding"] == embedding_bytes(spec)
    assert device.fixed["activations"] == 1.09 * GIB
    assert device.fixed["backend workspace"] == POOL.backend_workspace["flashinfer"].value
    before = sum(device.fixed[part] for part in device.fixed if part not in ("null block", "state and windows"))
    found = pool(150_000, kv_dtype="fp8", utilisation=0.93)
    assert found.pool_bytes == int(device.capacity_bytes - before)
    assert outside.capacity_bytes == pytest.approx(0.07 * VRAM_BYTES)


@pytest.mark.parametrize("pool_bytes", [2**31, 2**32])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_pool_of_given_bytes_is_all_that_requests_share(pool_bytes: int, batch: int) -> None:
    """Whatever utilisation says: what lies before it is added to it, and what is left of the device is outside."""
    for utilisation in (None, 0.5):
        plan = planned(kv_dtype="fp8", pool_bytes=pool_bytes, batch=batch, utilisation=utilisation)
        device, outside, _ = plan.memories
        blocks = {"null block", "state and windows"}
        before = sum(size for part, size in device.fixed.items() if part not in blocks)
        assert device.capacity_bytes == pytest.approx(before + pool_bytes)
        assert outside.capacity_bytes == pytest.approx(VRAM_BYTES - before - pool_bytes)
        assert plan.max_ctx_tokens() == ((pool_bytes // 26_214_400 - 1) // batch - 3) * 800


@pytest.mark.parametrize("kv_dtype", [name for name in VLLM.formats if name != "fp8_per_token_head"])
@pytest.mark.parametrize("model", [BATCH, FAST, LLAMA])
def test_a_pool_of_given_bytes_is_there_only_where_the_device_holds_it(model: str, kv_dtype: str) -> None:
    """It is taken whole, after weights and buffers: a byte more than is left, and no context at all fits."""
    asked_for = {"model": model, "kv_dtype": kv_dtype, "utilisation": 0.5}
    before = sum(fixed_parts(asked(**asked_for), POOL).values())
    room = int(VRAM_BYTES - before)
    held, refused = (planned(**asked_for, pool_bytes=size) for size in (room, room + 1))
    assert pool_of(held).blocks == room // pool_of(held).plan.block_bytes
    assert held.memories[0].used_bytes(held.pages) == pytest.approx(before + room)
    assert (pool_of(refused).blocks, refused.max_ctx_tokens(), refused.fits) == (0, 0, False)
    assert "of VRAM, the machine has 23.56 GiB" in refused.shortage()
    for plan in (held, refused):
        assert sum(pool.capacity_bytes for pool in plan.devices()) == pytest.approx(VRAM_BYTES)


@pytest.mark.parametrize("pool_bytes", [30 * GIB, 500 * 10**9, 2**50])
def test_what_is_short_is_the_pool_and_all_beside_it_less_the_device(pool_bytes: int) -> None:
    plan = planned(1024, kv_dtype="bf16", pool_bytes=pool_bytes)
    before = sum(fixed_parts(asked(kv_dtype="bf16"), POOL).values())
    short = math.ceil(before + pool_bytes - VRAM_BYTES)
    assert f"needs {format_bytes(before + pool_bytes)} of VRAM" in plan.shortage()
    assert f"({format_bytes(short)} short)" in plan.shortage()


@pytest.mark.parametrize(
    ("question", "workspace"), [({"kv_dtype": "fp8"}, True), ({"kv_dtype": "fp8", "backend": "triton"}, False)]
)
def test_only_a_backend_that_keeps_a_workspace_is_charged_for_it(question: dict[str, Any], workspace: bool) -> None:
    assert ("backend workspace" in planned(**question).memories[0].fixed) is workspace


def test_a_cold_start_leaves_less_than_a_warm_one() -> None:
    """The compiler's buffers count into the profile: 1.96 GiB in place of 1.09, 36 blocks of 800 tokens."""
    warm, cold = (pool(150_000, kv_dtype="fp8", utilisation=0.972, cold_start=cold) for cold in (False, True))
    assert warm.pool_bytes - cold.pool_bytes == pytest.approx(0.87 * GIB, abs=1)
    assert warm.blocks - cold.blocks in (35, 36)
    assert warm.plan == cold.plan


@pytest.mark.parametrize(
    ("sequences", "slots", "gib"), [(64, 152, 1.19), (8, 40, 0.3125), (4, 32, 0.25), (2, 28, 0.21875), (1, 26, 0.203)]
)
def test_tiles_that_wait_unquantised_take_2_slots_a_sequence_16_of_a_step_and_8(
    sequences: int, slots: int, gib: float
) -> None:
    """A slot is 128 tokens of K and V in 16 bits: 8 MiB over 16 layers. 64 seats take 1.19 GiB, 4 take 256 MiB."""
    found = planned(kv_dtype="kvarn_k4v2_g128", max_sequences=sequences).memories[0].fixed["unquantised tiles"]
    assert found == slots * 8 * MIB
    assert found / GIB == pytest.approx(gib, abs=0.005)


def test_shorter_tiles_wait_in_more_and_smaller_slots() -> None:
    """Tiles of 64: 2 x 64 + 32 + 8 slots of 4 MiB."""
    fixed = planned(kv_dtype="kvarn_k4v2_g64", max_sequences=64).memories[0].fixed
    assert fixed["unquantised tiles"] == (128 + 32 + 8) * 4 * MIB


@pytest.mark.parametrize(
    ("sequences", "longest", "tokens"),
    [
        (64, 262_144, 262_144),
        (4, 262_144, 262_144),
        (4, 10_000, 40_000),
        (64, 1000, 64_000),
        (1, 1000, 4096),
        (1, 400_000, 262_144),
    ],
)
def test_a_rebuilt_history_takes_4_kib_a_token_between_its_bounds(sequences: int, longest: int, tokens: int) -> None:
    """All sequences at their longest up to 262,144 tokens, at least 4,096; 1 GiB at most, shared by the layers."""
    found = planned(1, kv_dtype="kvarn_k4v2_g128", max_sequences=sequences, max_model_tokens=longest)
    assert found.memories[0].fixed["prefill scratch"] == tokens * 4096


def test_formats_without_tiles_keep_neither() -> None:
    for name in ("bf16", "fp8", "int8_per_token_head", "int4_per_token_head"):
        assert not {"unquantised tiles", "prefill scratch"} & planned(kv_dtype=name).memories[0].fixed.keys()


TURBO = {"kv_dtype": "turboquant_4bit_nc"}


@pytest.mark.parametrize(("ctx_tokens", "utilisation"), [(32_768, 0.972), (131_072, 0.90)])
def test_turboquant_runs_out_of_memory_where_it_was_seen_to(ctx_tokens: int, utilisation: float) -> None:
    """In scratch that the profile does not see: the pool itself would hold the request several times over."""
    plan = planned(ctx_tokens, utilisation=utilisation, **TURBO)
    assert not plan.fits
    assert [short.name for short in plan.short()] == ["gpu0 outside the engine's share"]
    assert pool_of(plan).concurrency > 2
    assert "VRAM on gpu0 outside the engine's share" in plan.shortage()


def test_turboquant_holds_short_prompts_and_other_formats_long_ones() -> None:
    assert planned(8192, utilisation=0.972, **TURBO).fits
    assert planned(65_536, utilisation=0.90, **TURBO).fits
    assert planned(131_072, utilisation=0.90, kv_dtype="fp8").fits


def test_turboquants_scratch_is_16_bit_k_and_v_of_the_prefix() -> None:
    """One copy of the longest request inside the profile: 0.5 GiB at 131,072 tokens; the fitted copies outside."""
    case = asked(1, max_model_tokens=131_072, **TURBO)
    device, outside, _ = plan_memory(case, RTX3090).memories
    assert device.fixed["prefill scratch"] == 0.5 * GIB
    copies = pool_rules(case).dequantises_prefix["turboquant"].value
    assert scratch_token_bytes(case) == copies * 4096
    assert outside.page_bytes["prefill scratch"] == copies * 4096 * block_plan(case).block_tokens
    assert scratch_token_bytes(asked(kv_dtype="fp8")) == scratch_token_bytes(asked(kv_dtype="kvarn_k4v2_g128")) == 0


def test_a_turboquant_pool_of_the_batch_mode_has_about_270_blocks_of_1568() -> None:
    found = pool(262_144, utilisation=0.972, **TURBO)
    assert found.plan.block_tokens == 1568
    assert found.printed_tokens == pytest.approx(413_000, rel=0.015)


def test_a_block_drafter_takes_its_weights_and_more_graphs_the_longer_its_drafts() -> None:
    plain = planned(model=FAST).memories[0].fixed
    fixed = {
        text: planned(model=FAST, speculation=text, accepted=1.0).memories[0].fixed
        for text in ("mtp:3", "dflash2:7", "dflash2:8", "dflash2:15")
    }
    assert [fixed[text]["drafter"] for text in fixed] == [215e6 + 108e6, 1.19e9, 1.19e9, 1.19e9]
    assert "drafter" not in plain
    assert fixed["mtp:3"]["graphs"] == plain["graphs"]
    assert [fixed[text]["graphs"] / GIB for text in fixed][1:] == [1.4, 1.9, 1.9]


def test_how_sure_a_pool_is_follows_from_what_was_taken_off_before_it() -> None:
    """Transient, graphs, workspace and capacity, each its own spread; a pool of given bytes is sure."""

    def spread_bytes(**question: Any) -> float:
        return planned(**question).memories[0].capacity_spread

    def of(*parts: float) -> float:
        return math.hypot(*parts, VRAM_BYTES * RTX3090.gpu.vram.spread)

    warm, cold = 0.08 * 1.09 * GIB, 0.08 * 1.96 * GIB
    drafting = {"model": FAST, "accepted": 1.0}
    assert spread_bytes() == pytest.approx(of(warm))
    assert spread_bytes(cold_start=True) == pytest.approx(of(cold))
    assert spread_bytes(kv_dtype="fp8") == pytest.approx(of(warm, 0.1 * 0.565 * GIB))
    assert spread_bytes(speculation="mtp:3", **drafting) == pytest.approx(of(warm))
    assert spread_bytes(speculation="dflash2:7", **drafting) == pytest.approx(of(warm, 0.1 * 1.4 * GIB))
    assert spread_bytes(speculation="dflash2:15", **drafting) == pytest.approx(of(warm, 0.1 * 1.9 * GIB))
    assert spread_bytes(**PINNED) == 0


@pytest.mark.parametrize(
    ("text", "question", "attention", "sliding"),
    [("", {}, 16, 0), ("mtp:3", {}, 17, 0), ("dflash2:7", {}, 16, 5)],
)
def test_a_drafters_layers_join_attention_unless_they_slide(
    text: str, question: dict[str, Any], attention: int, sliding: int
) -> None:
    drafting = {"speculation": text, "accepted": 1.0} if text else {}
    groups = block_plan(asked(model=FAST, **drafting, **question)).groups
    layers = {kind: sum(group.layers for group in groups if group.kind == kind) for kind in ("attention", "sliding")}
    assert layers == {"attention": attention, "sliding": sliding}
    assert sum(group.layers for group in groups if group.kind == "recurrent") == 48


@pytest.mark.parametrize(("text", "rows"), [("", 3), ("mtp:3", 6), ("mtp:4", 7), ("dflash2:7", 10), ("dflash2:15", 18)])
def test_a_state_keeps_a_row_of_its_convolution_more_for_every_drafted_token(text: str, rows: int) -> None:
    """1,572,864 B of state and 20,480 B for each of 3 + k rows."""
    drafting = {"speculation": text, "accepted": 1.0} if text else {}
    case = asked(model=FAST, **drafting)
    (state,) = {group.page_bytes for group in block_plan(case).groups if group.kind == "recurrent"}
    assert state == 1_572_864 + 20_480 * rows
    assert text or state == state_bytes(case.model, 2)


def test_a_state_in_fp32_makes_longer_blocks() -> None:
    assert block_plan(asked(kv_dtype="fp8")).block_tokens == 800
    assert block_plan(asked(kv_dtype="fp8", state_dtype="fp32")).block_tokens == 1568


def test_stock_vllm_pads_the_windows_of_an_int8_drafter() -> None:
    """385 blocks of a request are windows that fill a fiftieth of their page: 6.82 GiB to serve 32,768 tokens."""
    int8 = K7 | {"kv_dtype": "int8_per_token_head"}
    before, after = (block_plan(asked(32_768, **int8, promotes_windows=flag)) for flag in (False, True))
    assert before.bytes_per_request(32_768) / GIB == pytest.approx(6.82, abs=0.005)
    assert [group.blocks(32_768) for group in before.groups if group.kind == "sliding"] == [385]
    assert [group.block_tokens for group in after.groups if group.kind == "sliding"] == [864]
    stock = block_plan(asked(32_768, **int8, patched=False))
    assert stock.group_layers == 5
    assert [group.block_tokens for group in stock.groups if group.kind == "sliding"] == [16]


def test_llama_has_blocks_of_16_tokens_and_no_states() -> None:
    plan = planned(1000, model=LLAMA)
    cut = pool_of(plan).plan
    assert (cut.block_tokens, cut.group_layers, cut.state_blocks, len(cut.groups)) == (16, 32, 0, 1)
    assert cut.block_bytes == 16 * 32 * 4096
    assert plan.memories[0].page_bytes["kv cache"] == cut.block_bytes
    assert "state and windows" not in plan.memories[0].fixed
    assert cut.blocks_per_request(1000) == 63 == plan.pages


def test_the_engine_prints_one_block_more_than_it_can_use() -> None:
    """Its null block: 285 blocks hold 71 short requests of 4, not 71.25; 151 hold 37."""
    fp8 = pool(640, kv_dtype="fp8", pool_bytes=285 * 26_214_400)
    kvarn = pool(640, kv_dtype="kvarn_k4v2_g128", pool_bytes=151 * 27_525_120)
    assert (fp8.blocks, fp8.residents(640)) == (285, 71)
    assert (kvarn.blocks, kvarn.residents(640)) == (151, 37)
    assert pool(640, kv_dtype="fp8", pool_bytes=4 * 26_214_400).residents(640) == 0
    assert pool(640, kv_dtype="fp8", pool_bytes=5 * 26_214_400).residents(640) == 1


def test_several_devices_are_refused_with_machines_of_one() -> None:
    for count in (2, 3):
        with pytest.raises(Impossible) as refused:
            plan_memory(asked(), replace(RTX3090, gpu_count=count))
        assert str(refused.value) == f"vllm is modelled on one device, rtx3090 has {count}"
        assert "--hw rtx3090" in refused.value.hint


def test_an_engine_without_a_pool_has_no_plan_of_blocks() -> None:
    other = resolve(Question(ctx_tokens=1))
    for wanted in (block_plan, pool_rules):
        with pytest.raises(Impossible, match="exllamav3 shares no pool of blocks among requests"):
            wanted(other)
    assert plan_memory(other, load_profile("3x-rtx3090")).kv_pool is None


def test_weights_that_do_not_fit_leave_no_pool() -> None:
    plan = plan_memory(asked(), machine(vram_bytes=8 * GIB))
    found = pool_of(plan)
    assert (found.pool_bytes, found.blocks, found.printed_tokens, found.residents(1)) == (0, 0, 0, 0)
    assert not plan.fits
    assert plan.max_ctx_tokens() == 0
    bare = pool_of(plan_memory(asked(model=LLAMA), machine(vram_bytes=8 * GIB)))
    assert (bare.plan.blocks_per_request(1), bare.residents(1)) == (1, 0)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 1.0])
def test_what_an_engine_takes_and_what_it_leaves_are_the_device(share: float) -> None:
    device, outside, _ = planned(utilisation=share).memories
    assert device.capacity_bytes + outside.capacity_bytes == pytest.approx(VRAM_BYTES)
    assert outside.fixed["context"] <= outside.capacity_bytes


def test_variants_of_a_model_cut_their_pools_alike() -> None:
    plans = [block_plan(asked(model=name, kv_dtype="fp8")) for name in ("qwen3.8-27b", FAST, BATCH)]
    assert plans[0] == plans[1] == plans[2]


def one_memory(profile: HardwareProfile) -> HardwareProfile:
    """The same machine whose host's memory is the device's."""
    memory = replace(profile.host.memory, value=profile.gpu.vram.value)
    return replace(
        profile,
        host=replace(profile.host, memory=memory),
        gpu=replace(profile.gpu, unified_memory=True),
    )


@pytest.mark.parametrize("share", [{"utilisation": 0.75}, {"pool_bytes": 2 * GIB}])
def test_what_the_host_keeps_takes_from_what_an_engine_leaves_of_one_memory(share: dict[str, Any]) -> None:
    case = asked(8192, **share)
    apart, plan = plan_memory(case, RTX3090), plan_memory(case, one_memory(RTX3090))
    device, rest = plan.memories
    assert device == apart.memories[0]
    assert device.capacity_bytes + rest.capacity_bytes == pytest.approx(VRAM_BYTES)
    assert rest.fixed == apart.memories[1].fixed | apart.memories[2].fixed
    assert plan.fits


@pytest.mark.parametrize("share", [{"utilisation": 0.9}, {"pool_bytes": 7 * GIB}])
def test_an_engine_that_leaves_the_host_too_little_of_one_memory_does_not_start(share: dict[str, Any]) -> None:
    """4 GiB are reserved: 0.9 of 23.56 leaves 2.36."""
    case = asked(8192, **share)
    assert plan_memory(case, RTX3090).fits
    plan = plan_memory(case, one_memory(RTX3090))
    assert not plan.fits
    assert (plan.max_ctx_tokens(), pool_of(plan).blocks) == (0, 0)
    assert "of memory" in plan.shortage()
