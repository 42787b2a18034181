"""Ops of a drafter: what proposing costs in a decode step, and what following the prompt costs in prefill."""

from twin.ask.case import Case
from twin.formats import kv_format
from twin.layouts.layout import Pass
from twin.models.spec import Drafter
from twin.models.speculation import Speculation
from twin.operations.ops import Block, Engine, Op, Program


def draft_token_bytes(case: Case, drafter: Drafter) -> int:
    """Cache bytes of one token in one layer of the drafter."""
    tiled = bool(drafter.window) and case.fmt.tile_tokens > 1  # a window slides through tiles: it stays in 16 bits
    fmt = kv_format(drafter.kv_dtype or "bf16") if tiled or drafter.kv_dtype else case.fmt
    return fmt.plane_bytes(kv_heads=drafter.kv_heads, head_dim=drafter.head_dim)


def draft_program(case: Case, speculation: Speculation, step: Pass, device: int) -> Program:
    """One draft for every sequence: its passes one after the other, each through the layers and the output head.

    Beside them what a speculating step adds whatever it computes: sampling and rejection, and launches where the
    verify pass is not captured whole.
    """
    drafter = speculation.drafter
    rows = drafter.block_tokens if drafter.kind == "block" else 1
    tokens = rows * step.batch
    overheads = [case.rules.kernel("speculate", "step")]
    if case.backend in case.rules.piecewise_backends:
        overheads.append(case.rules.kernel("piecewise", "step"))
    launches = tuple(
        Op(part="launches", engine=Engine.SM, device=device, kernel=kernel, after=(at - 1,) if at else ())
        for at, kernel in enumerate(overheads)
    )
    ops = (
        _product(case, device, drafter.weight_bytes, drafter.parameters, tokens, after=()),
        _attention(case, drafter, Pass(past=step.past, rows=rows, batch=step.batch), device, decoding=True),
        _product(case, device, drafter.head_bytes, _head_parameters(case, drafter), tokens, after=(1,)),
    )
    return Block(ops=launches), Block(ops=ops, times=speculation.passes)


def draft_prefill_program(case: Case, speculation: Speculation, chunk: Pass, device: int) -> Program:
    """The drafter's layers over a prefill chunk, so that its cache follows the prompt."""
    drafter = speculation.drafter
    tokens = chunk.rows * chunk.batch
    product = _product(case, device, drafter.weight_bytes, drafter.parameters, tokens, after=())
    return (Block(ops=(product, _attention(case, drafter, chunk, device, decoding=False))),)


def _head_parameters(case: Case, drafter: Drafter) -> float:
    bits = case.model.weights.head_bits or case.model.weights.bits
    return drafter.head_bytes * 8 / bits


def _product(case: Case, device: int, read_bytes: int, parameters: float, tokens: int, *, after: tuple[int, ...]) -> Op:
    return Op(
        part="draft",
        engine=Engine.SM,
        device=device,
        kernel=case.linear_kernel,
        vram_bytes=read_bytes,
        flops=2.0 * parameters * tokens,
        dtype=case.rules.compute_dtype,
        grain=tokens,
        after=after,
    )


def _attention(case: Case, drafter: Drafter, work: Pass, device: int, *, decoding: bool) -> Op:
    """Attention of all the drafter's layers, over its window or the whole context."""
    past = min(work.past, drafter.window) if drafter.window else work.past
    seen = past + work.rows if decoding else past + (work.rows + 1) / 2
    if drafter.window:
        seen = min(seen, drafter.window)
    held = min(work.end, past + work.rows)
    if decoding:
        kernel = case.attention_kernel("attend_decode") if not drafter.window else ""
    else:
        kernel = case.attention_kernel("attend_dense")
    return Op(
        part="draft",
        engine=Engine.SM,
        device=device,
        kernel=kernel,
        vram_bytes=drafter.layers * held * draft_token_bytes(case, drafter) * work.batch,
        flops=4.0 * drafter.layers * drafter.query_heads * drafter.head_dim * work.rows * seen * work.batch,
        dtype=case.rules.compute_dtype,
        grain=work.rows if not decoding else 1,
        after=(0,),
    )


def draft_weight_bytes(speculation: Speculation | None) -> float:
    """Bytes of the drafter's own weights in VRAM."""
    if speculation is None:
        return 0.0
    drafter = speculation.drafter
    return float(drafter.weight_bytes + (drafter.head_bytes if drafter.own_head else 0))
