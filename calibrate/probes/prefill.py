"""The kernels of a prefill chunk of one layer: sparse attention in place, staged and from the host; row selection."""

from typing import TYPE_CHECKING, Literal, NamedTuple

from calibrate.probes.planes import SHAPE, WORST_ERROR, Tier, element_bytes, room, token_bytes
from calibrate.probes.probe import Context, Probe, Sample, check

if TYPE_CHECKING:
    from realkernels.backend import PrefillChunk, QsaCache


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
    longest = room(context, tier) / token_bytes(context, tier) / 2
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
    with context.backend.cache(SHAPE, layers=1, tokens=grid.contexts[-1], tier="vram") as cache:
        cache.fill_random(seed=4)
        for ctx, rows, bucket in context.points(points):
            samples.append(_attended(context, cache, ctx, rows, bucket))
        del cache
    return samples


def _attended(context: Context, cache: "QsaCache", ctx: int, rows: int, bucket: int) -> Sample:
    mode: Literal["in_place", "staged"] = "staged" if bucket else "in_place"
    chunk = context.backend.prefill_chunk(
        cache, layer=0, past=ctx - rows, rows=rows, mode=mode, bucket_tokens=bucket, copies="serial"
    )
    chunk.refresh(seed=5)
    seconds = context.seconds(context.backend.capture(chunk.run))
    how = _verify(f"attention of {rows} rows at {ctx} tokens, {mode}", chunk)
    buckets = -(-ctx // bucket) if bucket else 1
    at: dict[str, int | float | str] = {"ctx_tokens": ctx, "rows": rows, "bucket_tokens": bucket, "buckets": buckets}
    return Sample(at=at, seconds=seconds, moved_bytes=chunk.link_bytes, checked=how)


def _verify(name: str, chunk: "PrefillChunk") -> str:
    chunk.refresh(seed=6)
    chunk.run()
    error = chunk.verify()
    return check(name, error <= WORST_ERROR, f"relative error {error:.1e}")


def gather_rows_host(context: Context) -> list[Sample]:
    """Attention of few rows, each gathering its own selection from host memory."""
    grid = _fitting(context, _host_grid(context), "host")
    samples = []
    with context.backend.cache(SHAPE, layers=1, tokens=grid.contexts[-1], tier="host") as cache:
        cache.fill_random(seed=7)
        for ctx, rows in context.points([(ctx, rows) for ctx in grid.contexts for rows in grid.rows]):
            chunk = context.backend.prefill_chunk(cache, layer=0, past=ctx - rows, rows=rows, mode="in_place")
            chunk.refresh(seed=8)
            seconds = context.seconds(context.backend.capture(chunk.run))
            how = _verify(f"attention of {rows} rows at {ctx} tokens, from the host", chunk)
            moved = rows * SHAPE.budget * 2 * SHAPE.kv_heads * SHAPE.head_dim * element_bytes(context)
            at: dict[str, int | float | str] = {"ctx_tokens": ctx, "rows": rows}
            samples.append(Sample(at=at, seconds=seconds, moved_bytes=moved, checked=how))
            del chunk
        del cache
    return samples


def score_rows(context: Context) -> list[Sample]:
    """Selection of every row of a chunk."""
    grid = _fitting(context, _score_grid(context), "vram")
    samples = []
    with context.backend.cache(SHAPE, layers=1, tokens=grid.contexts[-1], tier="vram") as cache:
        cache.fill_random(seed=9)
        for ctx, rows in context.points([(ctx, rows) for ctx in grid.contexts for rows in grid.rows]):
            chunk = context.backend.prefill_chunk(cache, layer=0, past=ctx - rows, rows=rows, mode="in_place")
            chunk.refresh(seed=10)
            seconds = context.seconds(context.backend.capture(chunk.select))
            where = f"selection of {rows} rows at {ctx} tokens"
            how = check(where, chunk.verify_selection(), "some rows hold the best blocks")
            at: dict[str, int | float | str] = {"ctx_tokens": ctx, "rows": rows}
            flops = 2.0 * rows * (ctx // SHAPE.ratio) * SHAPE.index_heads * SHAPE.index_dim
            samples.append(Sample(at=at, seconds=seconds, flops=flops, checked=how))
            del chunk
        del cache
    return samples


PROBES = (
    Probe(name="attend_rows", run=attend_rows, quick_s=14, full_s=40),
    Probe(name="score_rows", run=score_rows, quick_s=2, full_s=15),
    Probe(name="gather_rows_host", run=gather_rows_host, quick_s=2, full_s=15),
)
