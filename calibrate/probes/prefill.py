"""The kernels of a prefill chunk of one layer: sparse attention in place, staged and from the host; row selection."""

from typing import NamedTuple

from calibrate.probes.planes import WORST_ERROR, Tier, planes, room, token_bytes
from calibrate.probes.probe import Context, Probe, Sample, check
from realkernels.caches.qsa import QsaCache
from realkernels.timed.sparse import PrefillAttend, PrefillSelect

MOST_STAGED_ROWS = 2048
"""Longer chunks are timed in place only."""


class Grid(NamedTuple):
    """Contexts, rows and buckets of a prefill probe."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    buckets: tuple[int, ...] = ()


def _attend_grid(context: Context) -> Grid:
    if context.cuda:
        return Grid((2**15, 2**18), context.pick((512, 2048), (512, 2048, 8192)), (2**12, 2**14, 2**16))
    return Grid(context.pick((2**12, 2**14), (2**14, 2**16)), context.pick((32, 64), (64, 256)), (2**12, 2**14))


def _score_grid(context: Context) -> Grid:
    if context.cuda:
        return Grid(context.pick((2**15, 2**18), tuple(2**power for power in range(12, 21))), (512, 2048))
    return Grid(context.pick((2**13, 2**15), (2**13, 2**15, 2**17)), (64, 256))


def _host_grid(context: Context) -> Grid:
    if context.cuda:
        return Grid(context.pick((2**15, 2**18), (2**15, 2**18, 2**20)), (32, 128))
    return Grid(context.pick((2**14,), (2**14, 2**16)), context.pick((16, 64), (32, 128)))


def _fitting(context: Context, grid: Grid, tier: Tier) -> Grid:
    """The grid without contexts whose planes take more than their share."""
    longest = room(context, tier) / token_bytes(tier) / 2
    return grid._replace(contexts=tuple(ctx for ctx in grid.contexts if ctx <= longest) or grid.contexts[:1])


def attend_rows(context: Context) -> list[Sample]:
    """Attention of a chunk on planes in device memory: in place, then by buckets copied within the device."""
    grid = _fitting(context, _attend_grid(context), "vram")
    points = [
        (ctx, rows, bucket)
        for rows in grid.rows
        for ctx in grid.contexts
        for bucket in (0, *reversed(grid.buckets))
        if bucket < ctx and (rows <= MOST_STAGED_ROWS or not bucket)
    ]
    samples = []
    with planes(context, layers=1, tokens=grid.contexts[-1], tier="vram") as cache:
        cache.fill_random(seed=4)
        for ctx, rows, bucket in context.points(points):
            samples.append(_attended(context, cache, ctx, rows, bucket))
        del cache
    return samples


def _attended(context: Context, cache: QsaCache, ctx: int, rows: int, bucket: int) -> Sample:
    mode = "staged" if bucket else "in_place"
    call = PrefillAttend(cache, ctx_tokens=ctx, q_tokens=rows, bucket_tokens=bucket, copies="serial")
    seconds = context.seconds(context.backend.capture(call.run))
    how = _verify(f"attention of {rows} rows at {ctx} tokens, {mode}", call)
    buckets = -(-ctx // bucket) if bucket else 1
    at: dict[str, int | float | str] = {"ctx_tokens": ctx, "rows": rows, "bucket_tokens": bucket, "buckets": buckets}
    return Sample(at=at, seconds=seconds, moved_bytes=call.moved_bytes, checked=how)


def _verify(name: str, call: PrefillAttend) -> str:
    error = call.verify()
    return check(name, error <= WORST_ERROR, f"relative error {error:.1e}")


def gather_rows_host(context: Context) -> list[Sample]:
    """Attention of few rows, each gathering its own selection from host memory."""
    grid = _fitting(context, _host_grid(context), "host")
    samples = []
    with planes(context, layers=1, tokens=grid.contexts[-1], tier="host") as cache:
        cache.fill_random(seed=7)
        for ctx, rows in context.points([(ctx, rows) for ctx in grid.contexts for rows in grid.rows]):
            call = PrefillAttend(cache, ctx_tokens=ctx, q_tokens=rows)
            seconds = context.seconds(context.backend.capture(call.run))
            how = _verify(f"attention of {rows} rows at {ctx} tokens, from the host", call)
            at: dict[str, int | float | str] = {"ctx_tokens": ctx, "rows": rows}
            samples.append(Sample(at=at, seconds=seconds, moved_bytes=call.moved_bytes, checked=how))
            del call
        del cache
    return samples


def score_rows(context: Context) -> list[Sample]:
    """Selection of every row of a chunk."""
    grid = _fitting(context, _score_grid(context), "vram")
    samples = []
    with planes(context, layers=1, tokens=grid.contexts[-1], tier="vram") as cache:
        cache.fill_random(seed=9)
        for ctx, rows in context.points([(ctx, rows) for ctx in grid.contexts for rows in grid.rows]):
            call = PrefillSelect(cache, ctx_tokens=ctx, q_tokens=rows)
            seconds = context.seconds(context.backend.capture(call.run))
            where = f"selection of {rows} rows at {ctx} tokens"
            how = check(where, call.error() == 0.0, "some rows hold the best blocks")
            at: dict[str, int | float | str] = {"ctx_tokens": ctx, "rows": rows}
            samples.append(Sample(at=at, seconds=seconds, flops=call.flops, checked=how))
            del call
        del cache
    return samples


PROBES = (
    Probe(name="attend_rows", run=attend_rows, quick_s=14, full_s=40),
    Probe(name="score_rows", run=score_rows, quick_s=2, full_s=15),
    Probe(name="gather_rows_host", run=gather_rows_host, quick_s=2, full_s=15),
)
