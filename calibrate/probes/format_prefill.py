"""Prefill over quantised caches: pieces of a cache unpacked, format by format, and whole chunks of a few formats.

What is unpacked is held against the format's own `read`, number by number, and a chunk's result against float64
attention over the unpacked cache.
"""

from functools import partial

from calibrate.probes.formats import FORMATS, KEPT, SHARE, TOLERANCE, _supported, shape_of
from calibrate.probes.probe import CannotRun, Context, Probe, Sample, check
from realkernels.caches.paged import NoKernel
from realkernels.codecs import Arrangement
from realkernels.timed.prefill import AttendChunk, Dequantise
from twin.expansion import FLASH_ROWS_WIDE
from twin.formats import kv_format
from twin.waves import Grid

EXPANDED = (512, 32_768, 65_536)
"""Tokens: one small piece, whose time is a launch, and many whole ones, more than a device's L2 holds."""

CPU_EXPANDED = (256, 2_048)
CHUNK_FORMATS = ("bf16", "int8_per_token_head", "kvarn_k4v2_g128", "fp16")
QUICK_CHUNKS = ((512, 16_384), (2_048, 16_384), (64, 32_768))
"""Rows and the tokens before them; few rows are divided over keys, 2,048 are not."""

CHUNKS = (*QUICK_CHUNKS, (2_048, 65_536), (512, 65_536), (192, 32_768), (512, 0))
ALONE_PAST = 16_384
"""Tokens before the rows whose last programs have a multiprocessor each."""

ALONE_AFTER = 2
"""Full waves before them, at the least."""

MOST_BLOCKS = 64
"""Of FLASH_ROWS_WIDE rows that are tried."""

CPU_CHUNKS = ((32, 1_024), (128, 1_024), (128, 2_048))


def expand(context: Context) -> list[Sample]:
    """Pieces of every format, from one cache that is larger than what the device keeps on its chip."""
    kept = [each for each in KEPT if not _supported(context.machine, name=each[0])]
    samples = []
    for name, arrangement in context.points(kept):
        try:
            samples += _expanded(context, name, arrangement)
        except NoKernel as missing:
            raise CannotRun(str(missing)) from None
    return samples


def _expanded(context: Context, name: str, arrangement: Arrangement) -> list[Sample]:
    points = EXPANDED if context.cuda else CPU_EXPANDED
    make = partial(
        Dequantise, name, arrangement=arrangement, shape=shape_of(context), device=context.backend.device
    )  # fmt: skip
    whole = make(tokens=points[-1])
    wrong = whole.verify()
    how = check(f"dequantising {name} ({arrangement})", wrong == 0, f"{wrong:.1e} of the numbers are not torch's")
    samples = []
    for tokens in points:
        timed = make(tokens=tokens, cache=whole.cache)
        seconds = context.seconds(context.backend.capture(timed.run))
        at: dict[str, int | float | str] = {"format": name, "arrangement": arrangement, "tokens": tokens}
        at |= {"piece_tokens": timed.kv_chunk_tokens, **vars(timed.shape)}
        samples.append(Sample(at=at, seconds=seconds, moved_bytes=timed.moved_bytes, checked=how))
    return samples


def chunks(context: Context) -> list[Sample]:
    """Whole chunks of one layer, rotations included, over formats that unpack at different costs."""
    names = [name for name in CHUNK_FORMATS if name in FORMATS and not _supported(context.machine, name=name)]
    points = [(name, *size) for name in names for size in _sizes(context)]
    try:
        return [_chunk(context, *point) for point in context.points(points) if _fits(context, *point)]
    except NoKernel as missing:
        raise CannotRun(str(missing)) from None


def _sizes(context: Context) -> tuple[tuple[int, int], ...]:
    """(rows, tokens before them)."""
    if not context.cuda:
        return context.pick(CPU_CHUNKS[:2], CPU_CHUNKS)
    rows = rows_with_some_alone(context.machine.sm_count, query_heads=shape_of(context).query_heads)
    sizes = context.pick(QUICK_CHUNKS, CHUNKS)
    return (*sizes, (rows, ALONE_PAST)) if rows else sizes


def rows_with_some_alone(multiprocessors: int, *, query_heads: int) -> int:
    """The fewest rows that leave a last wave at most a program a multiprocessor, after full waves; 0 if none do."""
    for blocks in range(1, MOST_BLOCKS):
        waves = Grid(programs=blocks * query_heads).on(multiprocessors)
        if waves.full >= ALONE_AFTER and waves.alone:
            return blocks * FLASH_ROWS_WIDE
    return 0


def _fits(context: Context, name: str, rows: int, past: int) -> bool:
    shape = shape_of(context)
    each = kv_format(name).plane_bytes(kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    return (past + rows) * each <= SHARE * context.machine.device_free_bytes


def _chunk(context: Context, name: str, rows: int, past: int) -> Sample:
    timed = AttendChunk(
        name, shape=shape_of(context), q_tokens=rows, ctx_tokens=past + rows, caches=1, device=context.backend.device
    )
    error = timed.verify()
    where = f"{rows} rows behind {past} tokens in {name}"
    how = check(where, error < TOLERANCE, f"relative error {error:.1e}")
    work = context.backend.capture(timed.run)
    timed.poison()
    seconds = context.seconds(work)
    check(where, timed.finite(), "all results written")
    at: dict[str, int | float | str] = {"format": name, "rows": rows, "past": past}
    at |= {"piece_tokens": timed.scratch.kv_chunk_tokens, **vars(timed.shape)}
    return Sample(at=at, seconds=seconds, moved_bytes=timed.moved_bytes, flops=timed.flops, checked=how)


PROBES = (
    Probe(name="format_expand", run=expand, quick_s=1.5, full_s=4.0),
    Probe(name="format_prefill", run=chunks, quick_s=4.0, full_s=10.0),
)
