"""Decode attention over quantised caches, and appending to them, format by format; see `realkernels/timed/`.

A format whose kernel this device does not have is skipped with the reason. Each point is checked against float64
attention over the unpacked cache before it is timed.
"""

import time
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from calibrate.probes.machine import Machine
from calibrate.probes.probe import CannotRun, Context, Probe, Sample, check, cuda_only
from realkernels.caches.paged import NoKernel
from realkernels.codecs import Arrangement, default_arrangement
from realkernels.kernels.prefill import KV_CHUNK_TOKENS
from realkernels.shape import AttentionShape
from realkernels.timed.append import Append
from realkernels.timed.attend_decode import AttendDecode
from realkernels.timed.compile_ahead import Wanted, compile_ahead
from twin.engines.twin import INLINE, QUANTISED, RULES
from twin.formats import kv_format

GPU_SHAPE = AttentionShape()
CPU_SHAPE = AttentionShape(query_heads=8, kv_heads=2, head_dim=64)
UNQUANTISED = ("bf16", "fp16")
FORMATS = (*UNQUANTISED, *QUANTISED)

TOLERANCE = 2e-2
"""Relative error of an output in half precision against float64 that is still called right."""

APPEND_LAYERS = {1: 8, 512: 2, 4096: 2}
"""Layers that take so many tokens each."""

CPU_APPENDED = 512
"""Tokens at the most where torch appends them."""

SHARE = 0.8
"""Of the free memory that the caches of a point may take."""

LEAST_CAPABILITY = (8, 0)


KEPT: tuple[tuple[str, Arrangement], ...] = (
    *((name, default_arrangement(name)) for name in FORMATS),
    *((name, "inline") for name in INLINE),
)
"""Formats and arrangements that are timed."""


class Point(NamedTuple):
    """`query_tokens` new tokens of each of `batch` sequences of `ctx_tokens` tokens, those included."""

    ctx_tokens: int
    batch: int
    query_tokens: int


GPU_POINTS = tuple(
    Point(*each)
    for each in (
        (8192, 1, 1), (131072, 1, 1), (8192, 8, 1), (131072, 8, 1), (32768, 1, 1), (65536, 16, 1),
        (16384, 8, 2), (131072, 2, 2), (8192, 1, 4), (131072, 1, 4), (8192, 4, 8),
        (8192, 1, 16), (131072, 1, 16), (32768, 8, 16), (8192, 8, 32), (131072, 1, 32),
    )
)  # fmt: skip
QUICK_POINTS = tuple(
    Point(*each)
    for each in ((8192, 1, 1), (131072, 1, 1), (32768, 8, 1), (131072, 1, 4), (8192, 1, 32), (131072, 1, 32))
)
INLINE_POINTS = tuple(point for point in GPU_POINTS if point.query_tokens in {1, 2, 16})
CPU_POINTS = tuple(Point(*each) for each in ((1024, 1, 1), (4096, 1, 1), (2048, 4, 1), (1024, 1, 4), (4096, 1, 4)))


def _supported(machine: Machine, *, name: str) -> str:
    capability = tuple(int(part) for part in machine.compute_capability.split("."))
    if not machine.is_cuda:
        return ""
    needs = RULES.needs.get(name, kv_format(name).min_capability)
    least = tuple(int(part) for part in needs.split(".")) if needs else LEAST_CAPABILITY
    if capability < max(least, LEAST_CAPABILITY):
        words = ".".join(str(part) for part in max(least, LEAST_CAPABILITY))
        return f"{name} needs compute capability {words}, this device has {machine.compute_capability}"
    return ""


def shape_of(context: Context) -> AttentionShape:
    """Heads that are timed on this device."""
    return GPU_SHAPE if context.cuda else CPU_SHAPE


def points_of(context: Context, *, inline: bool) -> tuple[Point, ...]:
    """Where attention is timed on this device, in this mode."""
    if not context.cuda:
        return CPU_POINTS[:2] if inline else context.pick(CPU_POINTS[::2], CPU_POINTS)
    return context.pick(QUICK_POINTS, INLINE_POINTS if inline else GPU_POINTS)


def compiled(context: Context) -> list[Sample]:
    """All kernels of all formats compiled side by side, so that what follows is not made of waiting for compilers."""
    wanted = []
    for name, arrangement in KEPT:
        if _supported(context.machine, name=name):
            continue
        inline = arrangement != default_arrangement(name)
        queries = sorted({point.query_tokens for point in points_of(context, inline=inline)})
        wanted += [Wanted(name, arrangement, tokens) for tokens in queries]
        wanted += [Wanted(name, arrangement, tokens, "append") for tokens in APPEND_LAYERS if not inline]
        wanted.append(Wanted(name, arrangement, KV_CHUNK_TOKENS, "dequantise"))
    begin = time.monotonic()
    failed = compile_ahead(wanted, device=str(context.backend.device))
    took = time.monotonic() - begin
    return [Sample(at={"kernels": len(set(wanted))}, seconds=(took,), checked="; ".join(failed) or "all compiled")]


def decode(context: Context, *, name: str, arrangement: Arrangement) -> list[Sample]:
    """Attention over the format's cache at each point that fits."""
    inline = arrangement != default_arrangement(name)
    try:
        return [
            _decoded(context, name, arrangement, point) for point in context.points(points_of(context, inline=inline))
            if _fits(context, name, point)
        ]  # fmt: skip
    except NoKernel as missing:
        raise CannotRun(str(missing)) from None


def _fits(context: Context, name: str, point: Point) -> bool:
    shape = shape_of(context)
    each = kv_format(name).plane_bytes(kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    return point.ctx_tokens * point.batch * each <= SHARE * context.machine.device_free_bytes


def _decoded(context: Context, name: str, arrangement: Arrangement, point: Point) -> Sample:
    shape = shape_of(context)
    timed = AttendDecode(
        name, arrangement=arrangement, shape=shape, ctx_tokens=point.ctx_tokens, batch=point.batch,
        q_tokens=point.query_tokens, device=context.backend.device,
    )  # fmt: skip
    error = timed.verify()
    how = check(f"{name} ({arrangement}) at {point}", error < TOLERANCE, f"relative error {error:.1e}")
    work = context.backend.capture(timed.run)
    timed.poison()
    seconds = context.seconds(work, per=timed.calls)
    check(f"{name} ({arrangement}) at {point}", timed.finite(), "all results written")
    at: dict[str, int | float | str] = {"format": name, "arrangement": arrangement, **point._asdict(), **vars(shape)}
    at |= {"caches": timed.calls, "rotated": timed.rotates}
    return Sample(at=at, seconds=seconds, moved_bytes=timed.cache_bytes, flops=timed.flops, checked=how)


def append(context: Context) -> list[Sample]:
    """New tokens into the caches of several layers, every format that this device has a kernel for."""
    points = [
        (name, tokens)
        for name in FORMATS
        if not _supported(context.machine, name=name)
        for tokens in APPEND_LAYERS
        if context.cuda or tokens <= CPU_APPENDED
    ]
    return [_appended(context, name, tokens) for name, tokens in context.points(points)]


def _appended(context: Context, name: str, tokens: int) -> Sample:
    layers, shape = APPEND_LAYERS[tokens] if context.cuda else 2, shape_of(context)
    timed = Append(name, shape=shape, tokens=tokens, layers=layers, device=context.backend.device)
    timed.poison()
    timed.run()
    faults = timed.faults()
    how = check(f"append to {name}", not faults, faults or "as torch appends in other pieces")
    work = context.backend.capture(timed.run)
    timed.poison()
    seconds = context.seconds(work, per=timed.calls, before=timed.poison)
    check(f"append to {name}", timed.finite(), "all tokens written")
    at: dict[str, int | float | str] = {"format": name, "tokens": tokens, **vars(shape)}
    return Sample(at=at, seconds=seconds, moved_bytes=timed.moved_bytes, checked=how)


def decode_name(name: str, arrangement: Arrangement) -> str:
    """What the probe of a format is called."""
    return f"format_decode_{name}" + ("" if arrangement == default_arrangement(name) else f"_{arrangement}")


def _probes() -> Iterable[Probe]:
    yield Probe(name="format_kernels", run=compiled, supported=cuda_only, quick_s=36.0, full_s=45.0)
    for name, arrangement in KEPT:
        yield Probe(
            name=decode_name(name, arrangement),
            run=partial(decode, name=name, arrangement=arrangement),
            supported=partial(_supported, name=name),
            quick_s=1.2,
            full_s=3.5,
        )
    yield Probe(name="format_append", run=append, quick_s=3.0, full_s=7.0)


PROBES = tuple(_probes())
