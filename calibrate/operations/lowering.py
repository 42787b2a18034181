"""From a point of an operation to ops of the twin, by the functions that whole predictions are made of."""

from functools import cache
from typing import Any

from msgspec.structs import replace

from calibrate.operations.operation import Point
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.models.spec import FeedForward, Layer
from twin.operations.collectives import layer_sums
from twin.operations.format_ops import Heads, append_op, decode_op, format_case, prefill_ops
from twin.operations.lower import decode_program, head_program, prefetch_program, prefill_program
from twin.operations.ops import HOST_DEVICE, Engine, Op, OpGraph, Program, Step
from twin.units import MIB

SPARSE_MODEL, DENSE_MODEL = "qwen3.8-flash-next", "llama-3.1-8b"
"""Whose shapes the points of sparse attention and of a dense layer have, where these name none."""
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PAGE_TOKENS = 256


def numbers(words: Any) -> tuple[int, ...]:
    """Of "24x4x256"."""
    return tuple(int(word) for word in str(words).split("x"))


def step_of(*, ctx_tokens: int, q_tokens: int = 1, batch: int = 1) -> Step:
    """The pass of the newest `q_tokens` of each sequence of `ctx_tokens`, those included."""
    return Step(kv_tokens=ctx_tokens - q_tokens, q_tokens=q_tokens, batch=batch)


# Attention over a cache that is read whole, and writing to it


def format_of(point: Point) -> Case:
    """A cache of the point's format, read by this project's kernels."""
    heads = Heads(*numbers(point["heads"])) if "heads" in point else None
    return format_case(str(point["format"]), inline=point.get("arrangement") == "inline", heads=heads)


def decode_format(point: Point, _dtype: str) -> Program:
    """Attention of each sequence's newest tokens over its whole cache."""
    sizes = {name: int(point[name]) for name in ("ctx_tokens", "batch")}
    return (OpGraph(ops=(decode_op(format_of(point), query_tokens=int(point["q_tokens"]), **sizes),)),)


def append_format(point: Point, _dtype: str) -> Program:
    """K and V of new tokens, computed in 16 bits and stored in the format."""
    return (OpGraph(ops=(append_op(format_of(point), tokens=int(point["tokens"])),)),)


def prefill_format(point: Point, _dtype: str) -> Program:
    """Attention of a chunk: kv chunks dequantised, attended to, combined."""
    ctx_tokens, q_tokens = int(point["ctx_tokens"]), int(point["q_tokens"])
    return (OpGraph(ops=prefill_ops(format_of(point), ctx_tokens=ctx_tokens, rows=q_tokens)),)


def dequantise_format(point: Point, _dtype: str) -> Program:
    """The first op of these alone."""
    return (OpGraph(ops=prefill_ops(format_of(point), ctx_tokens=int(point["tokens"]), rows=1)[:1]),)


# Sparse attention


@cache
def _sparse_case(layout: str, kv_dtype: str, offload: tuple[tuple[str, Any], ...], budget: int) -> Case:
    asked = {"model": SPARSE_MODEL, "engine": "twin", "layout": layout, "kv_dtype": kv_dtype, **dict(offload)}
    case = resolve(Question(ctx_tokens=1, **asked))
    if not budget or case.indexer is None:
        return case
    return case.of(replace(case.attention, indexer=replace(case.indexer, budget=budget)))


def sparse_case(point: Point, dtype: str) -> Case:
    """The placement that a point reads from: planes of `dtype` unless it names a format. Buckets come from the host."""
    kv_dtype, bucket = str(point.get("format", dtype)), int(point.get("bucket_tokens", 0))
    budget = int(point.get("budget", 0))
    if point["tier"] == "vram" and not bucket:
        return _sparse_case("vram", kv_dtype, (), budget)
    offload: dict[str, Any] = {"host_pages": "4KiB" if point["tier"] == "host4k" else "huge", "prefill": "naive"}
    if bucket:
        staging_bytes = bucket * _sparse_case("vram", kv_dtype, (), 0).plane_bytes
        offload |= {"prefill": "staged", "copies": point["copies"], "staging_bytes": staging_bytes}
    return _sparse_case("offload", kv_dtype, tuple(offload.items()), budget)


def sparse_decode(point: Point, dtype: str, *, parts: tuple[str, ...]) -> Program:
    """One layer of a decode step, or some of its parts, behind a stand-in backbone where the point has one."""
    case = sparse_case(point, dtype)
    backbone = int(point.get("backbone_mib", 0)) * MIB
    matrix = product_op("bf16", tokens=1, elements=backbone // 2)
    matrix = matrix if backbone else replace(matrix, kernel="")
    ops = case.layout.decode_ops(case, step_of(ctx_tokens=int(point["ctx_tokens"])), 0, first=1)
    return _only((OpGraph(ops=(matrix, *ops)),), parts)


def sparse_prefill(point: Point, dtype: str, *, parts: tuple[str, ...]) -> Program:
    """A chunk in one layer: its selection, or its attention in place, from the host or through buckets."""
    case = sparse_case(point, dtype)
    chunk = step_of(ctx_tokens=int(point["ctx_tokens"]), q_tokens=int(point["q_tokens"]))
    return _only(case.layout.prefill_graphs(case, chunk, 0, times=1), parts)


def _only(program: Program, parts: tuple[str, ...]) -> Program:
    """The ops of these parts, each after the nearest kept one that it waited for. ValueError where there are none."""
    kept = tuple(part for block in program if (part := _kept(block, parts)) is not None)
    if not kept:
        raise ValueError(f"there is nothing to time: none of {', '.join(parts)}")
    return kept


def _kept(block: OpGraph, parts: tuple[str, ...]) -> OpGraph | None:
    kept = [index for index, op in enumerate(block.ops) if op.part in parts]
    place = {index: number for number, index in enumerate(kept)}
    if not place:
        return None
    edges = (edge for edge in block.carried if edge.op in place and edge.earlier in place)
    return replace(
        block, ops=tuple(_after_kept(block.ops[index], block, place) for index in place),
        carried=tuple(edge._replace(op=place[edge.op], earlier=place[edge.earlier]) for edge in edges),
    )  # fmt: skip


def _after_kept(op: Op, block: OpGraph, place: dict[int, int]) -> Op:
    needs: set[int] = set()
    waiting = list(op.after)
    while waiting:
        need = waiting.pop()
        if need in place:
            needs.add(place[need])
        elif need >= 0:
            waiting.extend(block.ops[need].after)
    return replace(op, after=tuple(sorted(needs)))


# Products and a dense layer


def product_op(dtype: str, *, tokens: int, elements: int) -> Op:
    """A matrix of so many elements, read once, with `tokens` tokens: 2 operations an element and token."""
    return Op(
        part="weights", engine=Engine.SM, device=0, kernel=f"linear/twin/{dtype}", dtype=dtype, grain=tokens,
        vram_bytes=elements * ELEMENT_BYTES[dtype], flops=2.0 * tokens * elements,
    )  # fmt: skip


def product(point: Point, _dtype: str) -> Program:
    """One matrix [rows, columns]."""
    elements = int(point["rows"]) * int(point["columns"])
    return (OpGraph(ops=(product_op(str(point["dtype"]), tokens=int(point["tokens"]), elements=elements),)),)


@cache
def _dense_case(shape: str, tp: int = 1) -> Case:
    """The dense model under the rules of an engine that runs library kernels, one layer of it in `shape`."""
    case = resolve(Question(ctx_tokens=1, model=DENSE_MODEL, engine="vllm", kv_dtype="bf16", tp=tp))
    if not shape:
        return case
    hidden, query_heads, kv_heads, head_dim, intermediate = numbers(shape)
    attention = replace(case.attention, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
    layer = Layer(mixers=(attention,), feed_forward=FeedForward(intermediate=intermediate))
    model = replace(case.model, hidden=hidden, kinds=dict.fromkeys(case.model.kinds, layer))
    return replace(case, model=model, mixer=attention)


def dense_layer(point: Point, _dtype: str, *, parts: tuple[str, ...] = ()) -> Program:
    """One layer, or some parts of it, for new tokens of each sequence behind its past ones; a chain.

    The parts are those of a prefill chunk; one new token attends as a decode step does. `tp` ranks share a layer and
    sum it twice.
    """
    case, dtype = _dense_case(str(point.get("shape", "")), int(point.get("tp", 1))), str(point["dtype"])
    q_tokens = int(point.get("q_tokens", point.get("tokens", 1)))
    sizes = {"batch": int(point.get("batch", 1)), "ctx_tokens": int(point.get("past_tokens", 0)) + q_tokens}
    step = step_of(q_tokens=q_tokens, **sizes)
    alone = [op for block in reversed(prefill_program(case, step, 1)) for op in block.ops if op.engine is Engine.SM]
    layer = next(iter(case.model.kinds.values()))
    sums = layer_sums(case, layer, 0, q_tokens * int(point.get("batch", 1)), after=0)
    ops = {op.part: op for op in (*alone, *sums)}
    if q_tokens == 1:
        ops |= {op.part: op for op in decode_program(case, step, 1)[0].ops if op.part == "attention"}
    kept = [_typed(op, dtype) for part, op in ops.items() if not parts or part in parts]
    return (OpGraph(ops=tuple(replace(op, after=(at - 1,) if at else ()) for at, op in enumerate(kept))),)


def _typed(op: Op, dtype: str) -> Op:
    """An op of bf16 in another type, of the same library; sums are of 16 bits whatever is multiplied."""
    if op.engine is not Engine.SM:
        return op
    vram_bytes = op.vram_bytes * ELEMENT_BYTES[dtype] / ELEMENT_BYTES["bf16"]
    return replace(op, kernel=op.kernel.removesuffix("bf16") + dtype, dtype=dtype, vram_bytes=vram_bytes)


def sampling(point: Point, _dtype: str) -> Program:
    """A token from each row of fp32 logits."""
    (block,) = head_program(_dense_case(""), int(point["tokens"]), 1)
    return (OpGraph(ops=(replace(block.ops[1], after=()),)),)


# Rows and images


def disk_rows(point: Point, _dtype: str) -> Program:
    """Rows of the n-gram table for new tokens, from RAM, or from disk a page a row."""
    case = replace(_sparse_case("vram", "fp16", (), 0), ngram=str(point["source"]))
    fetch, _ = prefetch_program(case, step_of(ctx_tokens=int(point["tokens"]), q_tokens=int(point["tokens"])))[0].ops
    return (OpGraph(ops=(fetch,)),)


def page_image(point: Point, dtype: str, *, engine: Engine) -> Program:
    """A page copied to its image in RAM, or back: a header and the four planes of each layer, a copy each.

    Planes in VRAM cross the link; offloaded ones, all but the pooled keys, are read and written in host memory. A page
    at the end of the planes has `rows` tokens. The header's 64 bytes are not counted.
    """
    case = _sparse_case("vram", dtype, (), 0)
    layers, rows = int(point["layers"]), int(point.get("rows", PAGE_TOKENS))
    pooled_bytes = rows // (case.indexer.ratio if case.indexer else 1) * case.index_key_bytes
    kv_bytes = rows * (case.plane_bytes + case.index_key_bytes)
    kernel = {Engine.D2H: "evict_page", Engine.H2D: "restore_page"}[engine]
    over_link = Op(part="image", engine=engine, device=0, kernel=f"{kernel}/twin/uint8")
    if point["tier"] == "vram":
        copies = 4 * layers + 1
        return (
            OpGraph(ops=(replace(over_link, calls=copies, link_bytes=layers * (kv_bytes + pooled_bytes) / copies),)),
        )
    copies = 3 * layers + 1
    in_host = Op(
        part="image_in_host", engine=Engine.HOST, device=HOST_DEVICE, kernel=f"{kernel}_in_host/twin/uint8",
        calls=copies, host_bytes=2 * layers * kv_bytes / copies, after=(0,),
    )  # fmt: skip
    return (OpGraph(ops=(replace(over_link, calls=layers, link_bytes=pooled_bytes), in_host)),)
