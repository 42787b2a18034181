"""What the twin counts is what the kernels hold and move: bytes by tier, link bytes, selected tokens; never a fit."""

import os
from importlib.util import find_spec
from typing import Any

import pytest

from calibrate.operations.table import Case as Timed
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.engines import load_engine
from twin.formats import format_names, kv_format
from twin.layouts import layout_names, load_layout
from twin.operations.counts import complete_blocks, is_sparse, selected_tokens, sparse_threshold
from twin.operations.ops import Op, Program

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kv-twin[kernels]'")

from realkernels import layouts, steps  # noqa: E402 - after the skip
from realkernels.cpu_backend import CpuBackend  # noqa: E402
from realkernels.formats import arrangements, format_named  # noqa: E402
from realkernels.formats import format_names as held_formats  # noqa: E402
from realkernels.formats.blocks import BLOCK_FORMATS, record_of  # noqa: E402
from realkernels.shape import QsaShape  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OFFERED = [("cpu", "fp16"), ("cpu", "bf16"), ("cpu", "fp32"), ("triton", "fp16"), ("triton", "bf16")]
"""Formats of each backend's planes."""

SHAPE = QsaShape()


def backend(name: str, fmt: str) -> Any:
    """A backend whose planes are in `fmt`; Triton's through its interpreter, which needs no device."""
    if name == "cpu":
        return CpuBackend(dtype=DTYPES[fmt], threads=1)
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs triton and its interpreter")
    from realkernels.triton_backend import TritonBackend

    return TritonBackend(torch.device("cpu"), dtype=DTYPES[fmt])


def case_of(layout: str, fmt: str, ctx_tokens: int) -> Case:
    return resolve(Question(ctx_tokens=ctx_tokens, engine="twin", layout=layout, kv_dtype=fmt))


def by_formula(layout: str, fmt: str, *, tokens: int, layers: int) -> dict[str, int]:
    case = case_of(layout, fmt, tokens)
    placement = case.layout.placement(case)
    return {"vram": placement.vram_bytes * tokens * layers, "host": placement.host_bytes * tokens * layers}


def held(name: str, layout: str, fmt: str, *, tokens: int, layers: int) -> dict[str, int]:
    tier = layouts.load_layout(layout).tier
    with backend(name, fmt).cache(SHAPE, layers=layers, tokens=tokens, tier=tier) as cache:
        assert cache.tier == tier
        return dict(cache.bytes_by_tier())


def ops(program: Program) -> dict[str, Op]:
    return {op.part: op for block in program for op in block.ops}


def link_bytes(program: Program) -> float:
    return sum(op.link_bytes * op.calls * block.iterations * block.times for block in program for op in block.ops)


def test_both_rooms_have_the_same_layouts_formats_pages_and_shape() -> None:
    """Formats as planes of sparse attention, in either tier; what else is kept is read whole, see `test_lowering`."""
    assert layouts.layout_names() == layout_names()
    assert {load_layout(name).name for name in layout_names()} == {"vram", "offload"}
    assert held_formats() == format_names()
    for name in held_formats():  # only tiles wait
        assert bool(kv_format(name).sidecar_bytes) == (format_named(name).tile_tokens > 1)
    rules = load_engine("twin")
    assert rules.page_tokens == steps.PAGE_TOKENS
    assert set(rules.own_kernels.interleaved_formats) == set(BLOCK_FORMATS)
    assert set(rules.host_formats) == {fmt for _, fmt in OFFERED} | set(BLOCK_FORMATS)
    model = case_of("vram", "fp16", 1).model
    attention, indexer = model.attention, model.indexer
    assert indexer is not None
    heads = SHAPE.query_heads, SHAPE.kv_heads, SHAPE.head_dim
    assert heads == (attention.query_heads, attention.kv_heads, attention.head_dim)
    assert (SHAPE.index_heads, SHAPE.index_dim) == (indexer.query_heads, indexer.head_dim)
    assert (SHAPE.budget, SHAPE.ratio, SHAPE.topk) == (indexer.budget, indexer.ratio, indexer.block_topk)
    assert SHAPE.layers * attention.every == model.layers
    assert SHAPE.dense_limit == sparse_threshold(model)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_a_record_is_the_run_that_is_counted(fmt: str) -> None:
    at = {"tier": "host", "ctx_tokens": 98_306, "format": fmt, "layers": 3}
    (block,) = Timed(operation="decode_gather", at=at).program("fp16")
    (op,) = block.ops
    shape = {"block_tokens": SHAPE.ratio, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim}
    record_bytes = record_of(format_named(fmt), **shape).stride
    assert op.run_bytes == record_bytes
    assert op.link_bytes == (SHAPE.topk + 2 / SHAPE.ratio) * record_bytes
    placed = case_of("offload", fmt, 98_306)
    assert placed.layout.placement(placed).host_bytes == record_bytes // SHAPE.ratio + 2 * SHAPE.index_dim


@pytest.mark.parametrize("layout", ["vram", "offload"])
@pytest.mark.parametrize(("name", "fmt"), OFFERED)
@pytest.mark.parametrize(("tokens", "layers"), [(4, 1), (256, 12), (2_052, 2), (12_288, 3)])
def test_cache_bytes_by_formula_are_the_bytes_of_the_tensors(
    name: str, fmt: str, layout: str, tokens: int, layers: int
) -> None:
    formula = by_formula(layout, fmt, tokens=tokens, layers=layers)
    assert held(name, layout, fmt, tokens=tokens, layers=layers) == formula
    assert sum(formula.values()) > 0


@pytest.mark.parametrize("layout", ["vram", "offload"])
@pytest.mark.parametrize("open_tokens", [1, 2, 3])
def test_an_open_block_has_no_pooled_key_yet(layout: str, open_tokens: int) -> None:
    tokens = 2_052 + open_tokens
    formula = by_formula(layout, "fp16", tokens=tokens, layers=1)
    real = held("cpu", layout, "fp16", tokens=tokens, layers=1)
    pooled_bytes_per_token = SHAPE.index_dim * 2 // SHAPE.ratio
    assert formula["host"] == real["host"]
    assert formula["vram"] - real["vram"] == pooled_bytes_per_token * open_tokens


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("copies", ["serial", "overlapped"])
@pytest.mark.parametrize(
    ("ctx_tokens", "bucket_tokens"), [(2_304, 1_024), (2_305, 1_024), (3_071, 768), (2_560, 2_560), (2_304, 4_096)]
)
def test_a_staged_chunk_copies_the_bytes_of_its_program(
    fmt: str, copies: str, ctx_tokens: int, bucket_tokens: int
) -> None:
    sizes = {"ctx_tokens": ctx_tokens, "q_tokens": 4, "copies": copies, "bucket_tokens": bucket_tokens}
    case = Timed(operation="prefill_attention", at={"tier": "host", **sizes})
    made = backend("cpu", fmt)
    whole_pages = -(-ctx_tokens // steps.PAGE_TOKENS) * steps.PAGE_TOKENS
    with made.cache(SHAPE, layers=1, tokens=whole_pages, tier="host") as cache:
        cache.fill_random(1)
        chunk = made.prefill_chunk(
            cache, layer=0, past=ctx_tokens - 4, rows=4, mode="staged", bucket_tokens=bucket_tokens, copies=copies
        )
        copied: list[int] = []
        copy = chunk._copy
        chunk._copy = lambda bucket: copied.append(bucket) or copy(bucket)
        chunk.run()
        program = case.program(fmt)
        assert link_bytes(program) == pytest.approx(chunk.link_bytes, rel=1e-12)
        assert copied == list(range(program[0].iterations))
        assert chunk.verify() < 2e-2


def test_planes_that_are_read_in_place_copy_nothing_and_a_context_below_the_budget_is_no_step() -> None:
    made = backend("cpu", "fp16")
    with made.cache(SHAPE, layers=1, tokens=2_304, tier="host") as cache:
        cache.fill_random(1)
        assert made.prefill_chunk(cache, layer=0, past=2_300, rows=4, mode="in_place").link_bytes == 0
    made = backend("cpu", "fp16")
    with made.cache(SHAPE, layers=1, tokens=2_048, tier="vram") as cache, pytest.raises(ValueError, match="read whole"):
        made.decode_step(cache, end=2_047)


@pytest.mark.parametrize("end", [2_048, 2_049, 2_051, 2_052, 2_055, 4_097])
def test_a_decode_step_reads_the_tokens_that_are_counted(end: int) -> None:
    model = case_of("vram", "fp16", end).model
    made = backend("cpu", "fp16")
    with made.cache(SHAPE, layers=1, tokens=end, tier="vram") as cache:
        cache.fill_random(1)
        step = made.decode_step(cache, end=end)
        step.select()
        blocks = step.selected[0].long().unique()
        read = torch.zeros(end, dtype=torch.bool)
        read[(blocks[:, None] * SHAPE.ratio + torch.arange(SHAPE.ratio)).flatten()] = True
        read[end - end % SHAPE.ratio :] = True
        assert int(read.sum()) == selected_tokens(model, end)
        for plane in (cache.keys[0], cache.values[0]):
            plane[~read] = float("nan")
        step.gather()
        assert bool(step.output.isfinite().all())
        for token in (int(blocks[0]) * SHAPE.ratio, int(read.nonzero()[-1])):
            poisoned = cache.values[0][token].clone()
            cache.values[0][token] = float("nan")
            step.gather()
            assert not bool(step.output.isfinite().any())
            cache.values[0][token] = poisoned


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("end", [2_052, 4_097])
def test_a_decode_step_s_bytes_are_those_of_its_program(fmt: str, end: int) -> None:
    model = case_of("vram", fmt, end).model
    assert is_sparse(model, end)
    program = Timed(operation="decode_step", at={"tier": "vram", "ctx_tokens": end, "layers": 1}).program(fmt)
    made = backend("cpu", fmt)
    with made.cache(SHAPE, layers=1, tokens=end, tier="vram") as cache:
        cache.fill_random(1)
        step = made.decode_step(cache, end=end)
        assert ops(program)["pooled_scan"].vram_bytes == step.pooled(0).nbytes
        assert step.pooled(0).shape[0] == complete_blocks(model, end)
        token_bytes = cache.keys[0][0].nbytes + cache.values[0][0].nbytes
        assert ops(program)["kv_gather"].vram_bytes == selected_tokens(model, end) * token_bytes


# Formats: bytes by the twin's row and by the planes that are really allocated.

CASES = [(name, arrangement) for name in held_formats() for arrangement in arrangements(name)]
SHAPES = [(1, 128), (2, 256), (4, 256), (3, 512), (8, 128)]
SMALL = [(1, 16), (1, 32), (2, 32), (3, 64)]


@pytest.mark.parametrize(("name", "arrangement"), CASES)
def test_bytes_by_formula_are_the_bytes_of_the_tensors(name: str, arrangement: str) -> None:
    fmt, row = format_named(name, arrangement=arrangement), kv_format(name)
    assert fmt.tile_tokens == row.tile_tokens
    for kv_heads, head_dim in SHAPES:
        counted = row.plane_bytes(kv_heads=kv_heads, head_dim=head_dim)
        assert fmt.token_bytes(kv_heads, head_dim) == counted
        planes = fmt.allocate(2, 2 * fmt.tile_tokens, kv_heads, head_dim, torch.device("cpu"))
        assert sum(tensor.nbytes for tensor in planes.tensors.values()) == planes.nbytes == planes.slots * counted
    for kv_heads, head_dim in SMALL:  # where both take them
        try:
            held = fmt.token_bytes(kv_heads, head_dim)
        except ValueError:
            continue
        assert row.check(head_dim=head_dim) == ""
        assert held == row.plane_bytes(kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("name", [name for name in held_formats() if kv_format(name).sidecar_bytes])
def test_waiting_tokens_are_counted_alike(name: str) -> None:
    """A side slot holds K and V of a tile's tokens at the row's bytes an element."""
    fmt, row = format_named(name), kv_format(name)
    one, two = (
        fmt.allocate(2, fmt.tile_tokens, 2, 64, torch.device("cpu"), side_tiles=side_tiles) for side_tiles in (1, 2)
    )
    pools = [sum(planes.sidecar[name].nbytes for name in ("side_keys", "side_values")) for planes in (one, two)]
    assert pools[1] - pools[0] == pools[0] == row.tile_tokens * 2 * 64 * 2 * row.sidecar_bytes
