"""Which ops a pass is made of, on which device, what a draft adds, and that grouping equal layers changes nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.twin.memory.pool_worlds import BLOCK, SEQUENTIAL, W4A16, dense, drafted, pool_machine, pooled
from tests.worlds import LAWS, case, flash_next, machine, model, step
from twin.ask.case import Case
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.models import ModelSpec, load_model
from twin.models.mixers import Attention, Mamba2
from twin.models.spec import Drafter, FeedForward, Layer, Part, Stored, Weights
from twin.models.speculation import Speculation
from twin.operations import counts, lower
from twin.operations.ops import HOST_DEVICE, Engine, Op, OpGraph, Program, Step

SIX = dense(layers=6, every=3)
INT8_MLP = dense(weights=replace(W4A16, mlp_operands="int8"))
BF16 = dense(weights=Weights(format="bf16", bits=16))


def ops(program: Program, part: str) -> list[tuple[Op, int]]:
    """Ops of that part, each with how often it is done."""
    return [(op, graph.iterations * graph.times) for graph in program for op in graph.ops if op.part == part]


def same(one: Breakdown, other: Breakdown) -> bool:
    numbers = [
        [breakdown.seconds, breakdown.link_bytes, breakdown.link_write_bytes, breakdown.floor_s(), breakdown.naive_s()]
        + [value for _, value in sorted(breakdown.sensitivity().items())]
        for breakdown in (one, other)
    ]
    return numbers[0] == pytest.approx(numbers[1], rel=1e-9)


def total(program: Program, part: str, count: str) -> float:
    return sum(getattr(op, count) * times for op, times in ops(program, part))


def test_layers_are_split_in_order_and_evenly_and_groups_hold_every_layer_once() -> None:
    for layers, devices, split in ((4, 1, "0000"), (4, 2, "0011"), (4, 3, "0012"), (2, 4, "01"), (6, 3, "001122")):
        assert lower.split_layers(layers, devices) == tuple(map(int, split))
    kinds = flash_next().model.layer_kinds
    devices = lower.split_layers(len(kinds), 3)
    single = lower.layer_groups(kinds, devices, alone=len(kinds))
    assert [(group.index, group.kind) for group in single] == list(enumerate(kinds))
    grouped = lower.layer_groups(kinds, devices, alone=1)
    assert [(group.kind, group.count) for group in grouped] == [("recurrent", 1), ("recurrent", 35), ("attention", 12)]


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("devices", "crossings"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_the_residual_stream_hops_from_device_to_device(devices: int, crossings: int, grouped: bool) -> None:
    """1 stream x 8 elements x 4 bytes a token, down to the host and up again."""
    program = lower.prefill_program(case(), step(0, 16), devices, grouped=grouped)
    hops = ops(program, "hop")
    assert sum(times for _, times in hops) == 2 * crossings
    assert {op.link_bytes for op, _ in hops} == ({16 * 8 * 4} if crossings else set())
    assert {op.engine for op, _ in hops} == ({Engine.D2H, Engine.H2D} if crossings else set())
    if not grouped:
        places = [graph.ops[0].device for graph in program if graph.ops[0].part != "hop"]
        assert places == sorted(places)


OFFLOADED = [case(layout=layout, spec=model(layers=6, every=3, ngram=True)) for layout in ("vram", "offload")]
POOLED = [pooled(spec=spec) for spec in (dense(), INT8_MLP, BF16)]


@pytest.mark.parametrize("asked", [*OFFLOADED, *POOLED], ids=["vram", "offload", "w4a16", "int8 mlp", "bf16"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(("kv_tokens", "q_tokens"), [(0, 1), (300, 5), (4000, 1)])
def test_grouped_layers_take_as_long_as_layers_one_by_one(
    asked: Case, devices: int, kv_tokens: int, q_tokens: int
) -> None:
    batch = 1 if asked.rules.block_pool is None else 2
    roofs = Roofs(machine(gpu_count=devices) if batch == 1 else pool_machine(gpu_count=devices))
    decode, chunk = step(kv_tokens, q_tokens if batch == 2 else 1, batch), step(kv_tokens, 16)
    for program_of, of_step in ((lower.decode_program, decode), (lower.prefill_program, chunk)):
        found = [Breakdown().run(program_of(asked, of_step, devices, grouped=each), roofs) for each in (True, False)]
        assert same(*found)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_reads_all_weights_and_moves_all_states(grouped: bool, batch: int) -> None:
    """A chunk runs every token through every layer and computes no logits."""
    spec = case().model
    program = lower.decode_program(case(), step(100, batch=batch), 2, grouped=grouped)
    weights = sum(spec.parameters.values()) - spec.parameters["embedding"]
    assert total(program, "weights", "vram_bytes") == spec.stored_bytes({"attention": weights})
    assert total(program, "weights", "flops") == 2 * weights * batch
    (state,) = spec.states
    assert total(program, "state", "vram_bytes") == 2 * 2 * counts.state_bytes(state, 2) * batch
    chunk = lower.prefill_program(case(), step(32, 16, batch), 1)
    assert total(chunk, "weights", "flops") == 2 * (weights - spec.parameters["head"]) * 16 * batch
    assert {op.grain for op, _ in ops(chunk, "weights")} == {16 * batch}


LOWERED = [
    pytest.param(lambda case: lower.decode_program(case, step(100, batch=3), 1), 3, id="decode"),
    pytest.param(lambda case: lower.prefill_program(case, step(32, 16, 2), 1), 32, id="prefill"),
]


@pytest.mark.parametrize(("program_of", "tokens"), LOWERED)
def test_a_feed_forward_that_multiplies_in_another_type_is_a_product_of_its_own(program_of: Any, tokens: int) -> None:
    """Same bytes and operations as one product of all of them; mixers and head stay in the engine's operand type."""
    split, whole = (program_of(pooled(spec=spec)) for spec in (INT8_MLP, dense()))
    feed = 3 * 8 * 16
    int8 = [(op, times) for op, times in ops(split, "weights") if op.dtype == "int8"]
    assert sum(times for _, times in int8) == 4
    for op, _ in int8:
        assert (op.vram_bytes, op.flops, op.after) == (feed / 2, 2 * feed * -(-tokens // 16) * 16, (0,))
    mixers = [op for op, _ in ops(split, "weights") if op.dtype == "bf16"][:2]
    assert [op.vram_bytes for op in mixers] == [
        kind.mixers[0].matrices(8) / 2 for kind in reversed(dense().kinds.values())
    ]
    for count in ("vram_bytes", "flops"):
        assert total(split, "weights", count) == total(whole, "weights", count)
    assert {op.dtype for op, _ in ops(whole, "weights")} == {"bf16"}
    assert {op.grain for op, _ in ops(split, "weights")} == {tokens}
    alike = dense(weights=replace(W4A16, mlp_operands="bf16"))
    assert program_of(pooled(spec=alike)) == whole
    for spec in (INT8_MLP, BF16):  # whose mixer waits for what lies before it
        for graph in lower.decode_program(pooled(spec=spec), step(100), 1)[:-1]:
            assert [op.after for op in graph.ops] == [(), (0,), (1,)]


@pytest.mark.parametrize(("tokens", "issued"), [(1, 16), (16, 16), (17, 32), (2048, 2048)])
def test_a_product_of_4_bit_weights_computes_whole_tiles_of_16_tokens(tokens: int, issued: int) -> None:
    """The 17th query token costs a second tile (39.5 -> 47.8 ms, published); bytes do not change; bf16 has no tiles."""
    for spec, computed, bits in ((dense(), issued, 4), (BF16, tokens, 16)):
        head = spec.parameters["head"]
        active = sum(spec.parameters.values()) - spec.parameters["embedding"] - head
        program = lower.decode_program(pooled(spec=spec), step(100, batch=tokens), 1)
        assert total(program, "weights", "flops") == 2 * (active + head) * computed
        assert total(program, "weights", "vram_bytes") == active * bits / 8 + head * max(bits, 8) / 8
        assert {op.grain for op, _ in ops(program, "weights")} == {tokens}


@pytest.mark.parametrize(("program_of", "tokens"), LOWERED)
def test_elementwise_ops_are_separate_where_the_rate_of_products_leaves_them_out(program_of: Any, tokens: int) -> None:
    """Two residual adds with norms (8 x 8 elements), rotation (2 x 6 x 8) and gating (3 x 16), in 16 bits a token."""
    elementwise = ops(program_of(pooled(spec=BF16)), "elementwise")
    found = {(op.vram_bytes, times) for op, times in elementwise}
    assert found == {(2 * tokens * (64 + 48), 2), (2 * tokens * (64 + 96 + 48), 2)}
    assert {(op.kernel, op.after) for op, _ in elementwise} == {("elementwise/library/bf16", (0,))}
    assert not ops(program_of(pooled()), "elementwise")


@pytest.mark.parametrize(("q_tokens", "batch"), [(1, 1), (1, 3), (4, 1), (16, 3)])
@pytest.mark.parametrize(("state_dtype", "element_bytes"), [("fp16", 2), ("fp32", 4)])
def test_a_state_is_read_once_and_written_after_every_token_that_may_be_the_last(
    q_tokens: int, batch: int, state_dtype: str, element_bytes: int
) -> None:
    """2 heads of 4 x 4 and a convolution's tail of 3 x 16 inputs in 16 bits; a chunk leaves one state behind."""
    asked = pooled(spec=SIX, state_dtype=state_dtype)
    held = 2 * 16 * element_bytes + 3 * 16 * 2
    program = lower.decode_program(asked, step(100, q_tokens, batch), 1)
    ((state, times),) = ops(program, "state")
    assert (state.vram_bytes, times) == ((1 + q_tokens) * held * batch, 4)
    assert (state.kernel, state.grain) == (f"recurrent/vllm/{state_dtype}", batch)
    ((attend, times),) = ops(program, "attention")  # one read of the whole cache after its weights
    assert (attend.vram_bytes, times, attend.after) == ((100 + q_tokens) * 64 * batch, 2, (0,))
    ((kept, times),) = ops(lower.prefill_program(asked, step(0, q_tokens, batch), 1), "state")
    assert (kept.vram_bytes, times) == (2 * held * batch, 4)


@pytest.mark.parametrize(("q_tokens", "batch"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_logits_of_every_query_token_are_sampled_from(q_tokens: int, batch: int) -> None:
    """A head of 8 x 32 in 8 bits, then 32 logits of 4 B a token; only where the engine's sampling has a rate."""
    tokens = q_tokens * batch
    head, sample, _ = lower.decode_program(pooled(), step(100, q_tokens, batch), 1)[-1].ops
    assert (head.vram_bytes, head.flops, head.grain) == (256, 2 * 256 * 16, tokens)
    assert (sample.part, sample.vram_bytes, sample.grain) == ("sampling", tokens * 32 * 4, tokens)
    assert (sample.kernel, sample.after) == ("sample/library/fp32", (0,))
    assert not ops(lower.decode_program(case(), step(100), 1), "sampling")
    assert not ops(lower.prefill_program(pooled(), step(0, 16), 1), "sampling")


@pytest.mark.parametrize(("eager", "kernel"), [(False, "step/vllm/decode"), (True, "step/vllm/eager")])
def test_a_step_ends_on_the_host_whose_time_depends_on_what_is_captured(kernel: str, *, eager: bool) -> None:
    *_, host = lower.head_program(pooled(eager=eager), 3, 1)[0].ops
    assert (host.part, host.kernel, host.vram_bytes, host.after) == ("host", kernel, 0, (1,))
    assert not any(op.part == "host" for op in lower.head_program(case(), 3, 1)[0].ops)


@pytest.mark.parametrize("spec", [SIX, INT8_MLP, BF16], ids=["w4a16", "int8 mlp", "bf16"])
def test_a_step_is_its_backbone_its_head_and_its_attention(spec: Any) -> None:
    """What serving sums from parts is what a single prediction lowers whole."""
    asked, roofs = pooled(spec=spec), Roofs(pool_machine())
    chunk = step(32, 16)
    whole = Breakdown().run(lower.prefill_program(asked, chunk, 1), roofs)
    parts = Breakdown().run(lower.backbone_program(asked, 16, 1, 1), roofs)
    assert same(whole, parts.run(lower.prefill_attention_program(asked, chunk, 1), roofs))
    decode = lower.decode_program(asked, step(300, batch=5), 1)
    backbone = (*lower.backbone_program(asked, 5, 5, 1), *lower.head_program(asked, 5, 1))
    attention_s = total(decode, "attention", "vram_bytes") / 1e9
    assert Breakdown().run(decode, roofs).seconds == pytest.approx(
        Breakdown().run(backbone, roofs).seconds + attention_s, rel=1e-9
    )


TABLE = model(ngram=True).ngram
assert TABLE is not None


@pytest.mark.parametrize(
    ("where", "row_bytes", "engine", "read_bytes"),
    [("ram", 100, Engine.HOST, 100), ("disk", 100, Engine.DISK, 4096), ("disk", 5000, Engine.DISK, 5000)],
)
def test_ngram_rows_are_fetched_from_where_they_lie(
    where: str, row_bytes: int, engine: Engine, read_bytes: int
) -> None:
    """2 rows a token; a disk reads no less than a page for each; without a table nothing is fetched."""
    asked = replace(case(spec=replace(model(), ngram=replace(TABLE, row_bytes=row_bytes))), ngram=where)
    (graph,) = lower.prefetch_program(asked, step(0, 16, 2))
    fetch, send = graph.ops
    assert (fetch.engine, fetch.device) == (engine, HOST_DEVICE)
    assert (fetch.host_bytes, fetch.run_bytes) == (64 * read_bytes, read_bytes)
    assert (send.engine, send.device, send.link_bytes, send.after) == (Engine.H2D, 0, 64 * row_bytes, (0,))
    assert lower.prefetch_program(case(), step(0, 16)) == ()


@pytest.mark.parametrize(("before_layer", "position"), [(0, 0), (1, 0), (2, 1)])
def test_a_decode_step_fetches_rows_beside_the_layer_before_their_use(before_layer: int, position: int) -> None:
    asked = case(spec=replace(model(), ngram=replace(TABLE, before_layer=before_layer)))
    program = lower.decode_program(asked, step(100), 1)
    assert [at for at, graph in enumerate(program) if any(op.part == "ngram" for op in graph.ops)] == [position]
    graph = program[position]
    fetch = next(index for index, op in enumerate(graph.ops) if op.part == "ngram")
    assert (graph.ops[fetch].after, graph.ops[fetch + 1].after) == ((), (fetch,))
    assert (len(graph.ops) == 2) is (before_layer == 0)


TOKEN_BYTES = 64
"""K and V of one token in one layer of either drafter, in bf16: 2 x 2 x 8 or 2 x 1 x 16 elements."""


def draft(speculation: Speculation, kv_tokens: int = 40, batch: int = 1, **asked: Any) -> OpGraph:
    """The graph of the drafter's passes, without its overheads."""
    of_case = pooled(speculation=speculation, **asked)
    launches, passes = lower.draft_program(of_case, speculation, step(kv_tokens, batch=batch), 0)
    assert {op.part for op in launches.ops} == {"launches"}
    return passes


@pytest.mark.parametrize(("tokens", "batch", "head_bits"), [(1, 1, 8), (2, 3, 4), (4, 1, None)])
def test_a_sequential_drafter_passes_once_for_every_token(tokens: int, batch: int, head_bits: float | None) -> None:
    """Layers of 50 B and 100 parameters, a token a sequence; a head of 24 B has what they hold at the model's bits."""
    parts = {"head": Stored(format="w4a16", bits=head_bits)} if head_bits else {}
    spec = dense(weights=replace(W4A16, parts=parts))
    assert [lower.draft_weight_bytes(each) for each in (None, drafted(), drafted(BLOCK))] == [0, 50 + 24, 500]
    passes = draft(drafted(SEQUENTIAL, tokens), batch=batch, spec=spec)
    layers, attend, head = passes.ops
    assert passes.times == tokens
    assert (layers.vram_bytes, layers.flops, layers.grain) == (50, 2 * 100 * batch, batch)
    assert (head.vram_bytes, head.flops, head.grain) == (24, 2 * 24 * 8 / (head_bits or 4) * batch, batch)
    assert (attend.vram_bytes, attend.flops) == (41 * TOKEN_BYTES * batch, 4 * 1 * 4 * 8 * 41 * batch)
    assert draft(drafted(replace(SEQUENTIAL, block_tokens=4), tokens), batch=batch, spec=spec) == passes
    assert [op.after for op in passes.ops] == [(), (0,), (1,)]
    assert {(op.part, op.engine, op.dtype) for op in passes.ops} == {("draft", Engine.SM, "bf16")}
    assert {layers.kernel, head.kernel} == {"linear/marlin/w4a16"}


@pytest.mark.parametrize(("tokens", "batch"), [(1, 3), (8, 1)])
@pytest.mark.parametrize(("kv_tokens", "read", "seen"), [(0, 4, 4), (5, 9, 9), (16, 20, 16), (10**6, 20, 16)])
def test_a_block_drafter_passes_once_over_its_block_however_much_is_looked_up(
    tokens: int, batch: int, kv_tokens: int, read: int, seen: int
) -> None:
    """Two layers over 4 tokens and a window of 16 that fills and then slides: their own tokens are read beside it."""
    passes = draft(drafted(BLOCK, tokens), kv_tokens, batch=batch)
    layers, attend, head = passes.ops
    assert passes.times == 1
    assert (layers.vram_bytes, layers.flops, layers.grain) == (500, 2 * 1000 * 4 * batch, 4 * batch)
    assert (head.vram_bytes, head.flops, head.grain) == (32, 2 * 32 * 4 * batch, 4 * batch)
    assert attend.vram_bytes == 2 * read * TOKEN_BYTES * batch
    assert attend.flops == 4 * 2 * 2 * 16 * 4 * seen * batch
    assert (attend.grain, attend.kernel) == (1, "")  # a window is read at the memory's own rate
    assert [op.after for op in passes.ops] == [(), (0,), (1,)]


@pytest.mark.parametrize(
    ("kv_dtype", "attention", "piecewise"),
    [("bf16", "flash_attention", False), ("int8_per_token_head", "triton", False), ("fp8", "flashinfer", True),
     ("kvarn_k4v2_g128", "kvarn", True)],
)  # fmt: skip
def test_a_speculating_step_pays_for_sampling_and_for_graphs_that_are_not_whole(
    kv_dtype: str, attention: str, *, piecewise: bool
) -> None:
    """FlashInfer and KVarN capture only single-token steps whole (facts of the published lane, section 1)."""
    speculation = drafted(SEQUENTIAL)
    launches, passes = lower.draft_program(pooled(kv_dtype=kv_dtype, speculation=speculation), speculation, step(40), 0)
    kernels = ["speculate/vllm/step", "piecewise/vllm/step"][: 1 + piecewise]
    assert [op.kernel for op in launches.ops] == kernels
    assert [op.after for op in launches.ops] == [(), (0,)][: len(kernels)]
    assert launches.times == 1
    assert not any(op.vram_bytes or op.flops for op in launches.ops)
    assert passes.ops[1].kernel == f"attend_decode/{attention}/{kv_dtype}"


def prefilled(drafter: Drafter, chunk: Step) -> tuple[Op, Op]:
    speculation = drafted(drafter)
    (graph,) = lower.draft_prefill_program(pooled(speculation=speculation), speculation, chunk, 0)
    product, attend = graph.ops
    assert graph.times == 1
    return product, attend


@pytest.mark.parametrize(("kv_tokens", "seen", "read"), [(0, 3.5, 6), (5, 8.5, 11), (100, 16, 22)])
def test_a_drafter_follows_a_prompt_and_a_window_no_further_than_it_reaches(
    kv_tokens: int, seen: float, read: int
) -> None:
    """6 tokens of 2 sequences: products of each, causal attention over the tokens before; no logits."""
    product, attend = prefilled(SEQUENTIAL, step(kv_tokens, 6, 2))
    assert (product.vram_bytes, product.flops, product.grain) == (50, 2 * 100 * 12, 12)
    assert attend.flops == 4 * 4 * 8 * 2 * sum(range(kv_tokens + 1, kv_tokens + 7))
    assert attend.vram_bytes == (kv_tokens + 6) * TOKEN_BYTES * 2
    assert (attend.kernel, attend.grain) == ("attend_dense/flash_attention/bf16", 6)
    product, attend = prefilled(BLOCK, step(kv_tokens, 6))
    assert (product.flops, attend.flops) == (2 * 1000 * 6, 4 * 2 * 2 * 16 * 6 * seen)
    assert attend.vram_bytes == 2 * read * TOKEN_BYTES


@pytest.mark.parametrize(
    ("kv_dtype", "sequential", "block"),
    [("bf16", 4096, 4096), ("int8_per_token_head", 2080, 2112), ("kvarn_k4v2_g128", 840, 4096)],
)
def test_a_drafter_keeps_its_cache_as_the_model_does_unless_its_window_slides_through_tiles(
    kv_dtype: str, sequential: int, block: int
) -> None:
    """MTP: 4 heads x 256 like the model; DFlash2: 8 heads x 128, in bf16 beside KVarN. One of its own it keeps."""
    of_case = replace(pooled(kv_dtype=kv_dtype), model=load_model("qwen3.8-27b"))
    drafters = of_case.model.drafters
    assert [lower.draft_token_bytes(of_case, drafter) for drafter in drafters] == [sequential, block]
    assert [lower.draft_token_bytes(of_case, replace(drafter, kv_dtype="fp8")) for drafter in drafters] == [2048, 2048]


@LAWS
@given(st.sampled_from([SEQUENTIAL, BLOCK]), st.integers(0, 5000), st.integers(1, 300), st.integers(1, 300))
def test_a_prompt_in_two_chunks_multiplies_what_it_does_in_one(
    drafter: Drafter, kv_tokens: int, one: int, two: int
) -> None:
    """Products exactly; attention too where nothing slides."""
    whole = prefilled(drafter, step(kv_tokens, one + two))
    parts = [prefilled(drafter, chunk) for chunk in (step(kv_tokens, one), step(kv_tokens + one, two))]
    assert whole[0].flops == sum(part[0].flops for part in parts)
    if not drafter.window:
        assert whole[1].flops == pytest.approx(sum(part[1].flops for part in parts))


# Layers of other kinds

WINDOW = Attention(query_heads=4, kv_heads=1, head_dim=16, window=32)
SHARED = replace(WINDOW, shares_kv=True)
LOCAL = Attention(query_heads=4, kv_heads=2, head_dim=8, value_dim=4, local_chunk=48)
MAMBA = Mamba2(heads=2, head_dim=4, groups=1, state=8, conv_kernel=4)


def kinds_of(**layers: Layer) -> ModelSpec:
    """The toy model with one layer of each kind."""
    order = tuple((name, 1) for name in layers)
    return replace(
        dense(layers=len(layers), every=1), kinds=layers, order=order, weights=Weights(format="bf16", bits=16)
    )


def attention_of(program: Program) -> list[Op]:
    return [op for graph in program for op in graph.ops if op.part == "attention"]


@pytest.mark.parametrize(("kv_tokens", "window", "local"), [(9, 10, 10), (99, 32, 4), (191, 32, 48)])
def test_a_decode_step_reads_no_more_than_a_window_or_the_own_chunk(kv_tokens: int, window: int, local: int) -> None:
    """Bytes of one token in 16 bits: 2 x 16 x 2 of the window's one head, (8 + 4) x 2 x 2 of the two local ones."""
    spec = kinds_of(window=Layer(mixers=(WINDOW,)), shared=Layer(mixers=(SHARED,)), local=Layer(mixers=(LOCAL,)))
    case = pooled(spec=spec)
    reads = [op.vram_bytes for op in attention_of(lower.decode_program(case, step(kv_tokens), 1))]
    assert reads == [window * 64, window * 64, local * 48]  # a shared cache is read all the same
    flops = [op.flops for op in attention_of(lower.prefill_program(case, step(0, kv_tokens + 1), 1))]
    whole = step(0, kv_tokens + 1)
    pairs = [whole.within_window(32).pairs, whole.within_window(32).pairs, whole.within_chunk(48).pairs]
    assert flops == [2 * 4 * width * each for width, each in zip((32, 32, 12), pairs, strict=True)]


def test_mixers_side_by_side_are_a_chain_in_one_layer_and_a_layer_may_have_none() -> None:
    both, alone = Layer(mixers=(WINDOW, MAMBA)), Layer(feed_forward=FeedForward(intermediate=16))
    program = lower.decode_program(pooled(spec=kinds_of(both=both, alone=alone)), step(99), 1)
    assert [op.part for op in program[0].ops if op.part != "elementwise"] == ["weights", "attention", "state"]
    assert {op.part for op in program[1].ops} <= {"weights", "elementwise"}
    (state,) = (op for op in program[0].ops if op.part == "state")
    assert state.kernel == "mamba2/vllm/fp16"
    assert state.vram_bytes == 2 * (2 * 4 * 8 + 3 * (8 + 16)) * 2


def test_parts_that_are_stored_otherwise_are_products_of_their_own() -> None:
    """Experts in 4 bits beside attention and router in 16: two kernels; only the chosen experts are read."""
    experts = FeedForward(experts=8, active=2, intermediate=16)
    spec = kinds_of(moe=Layer(mixers=(replace(WINDOW, window=0),), feed_forward=experts))
    parts: dict[Part, Stored] = {"experts": Stored(format="w4a16", bits=4)}
    case = pooled(spec=replace(spec, weights=replace(spec.weights, parts=parts)))
    plain, packed, _ = (op for op, _ in ops(lower.decode_program(case, step(99), 1), "weights"))
    assert (plain.kernel, packed.kernel) == ("linear/library/bf16", "experts/marlin/w4a16")
    assert packed.vram_bytes == 2 * 3 * 8 * 16 / 2
    assert plain.vram_bytes == 2 * (WINDOW.matrices(8) + 8 * 8)
    assert packed.after == (0,)
