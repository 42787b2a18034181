"""Which kernel cases are measured to validate a machine. No context, chunk or bucket is one that calibration uses.

Calibration takes powers of two from 4,096 on, chunks of 512 and 2,048 rows, buckets of 4,096, 16,384 and 65,536 tokens;
everything here is 3 x 2^k, 9 x 2^k or odd, except the long curve, which is shown apart.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from calibrate.kernel_cases import KernelCase

LONG_CURVE = (2_048, 8_192, 24_576, 98_304, 393_216, 786_432, 1_048_320, 1_572_864, 2_359_296, 3_145_728)
"""Contexts of the long curve; the first is still read whole, so that its step is the gather alone."""

DECODE_CTX = (6_145, 12_288, 49_153, 98_306, 196_608, 393_217, 786_435, 1_179_648)
PREFILL = ((12_288, 768), (49_152, 1_536), (98_304, 3_072), (196_608, 1_536))
BUCKETS = (6_144, 12_288, 24_576, 49_152)
MIB = 2**20


def validation_grid(*, quick: bool, device: str) -> list[KernelCase]:
    """Cases of the grid, for a GPU or for the CPU (smaller), quick or whole."""
    if device == "cpu":
        return list(_cpu_grid(quick=quick))
    cases = list(_decode_cases(DECODE_CTX[:4] if quick else DECODE_CTX, layers=12))
    cases += list(_prefill_cases(PREFILL[:2] if quick else PREFILL, BUCKETS[:2] if quick else BUCKETS))
    cases += [
        KernelCase(metric="decode_step", tier=tier, ctx_tokens=ctx, backbone_bytes=size * MIB)
        for tier in ("vram", "host")
        for ctx, size in ((98_306, 48), (786_435, 96))[: 1 if quick else 2]
    ]
    return cases


def long_curve(tier: str, *, most_tokens: int) -> list[KernelCase]:
    """Decode of 12 layers at the contexts of the curve."""
    return [
        KernelCase(
            metric="decode_gather" if ctx == LONG_CURVE[0] else "decode_step",
            tier="vram" if tier == "vram" else "host",
            ctx_tokens=ctx,
        )
        for ctx in LONG_CURVE
        if ctx <= most_tokens
    ]


def _decode_cases(contexts: tuple[int, ...], *, layers: int) -> Iterator[KernelCase]:
    for ctx in contexts:
        for tier in ("vram", "host"):
            for metric in ("decode_step", "decode_gather"):
                yield KernelCase(metric=metric, tier=tier, ctx_tokens=ctx, layers=layers)
        yield KernelCase(metric="decode_select", tier="vram", ctx_tokens=ctx, layers=layers)
        if ctx <= MIB:
            yield KernelCase(metric="decode_gather", tier="host", ctx_tokens=ctx, layers=layers, huge_pages=False)


def _prefill_cases(chunks: tuple[tuple[int, int], ...], buckets: tuple[int, ...]) -> Iterator[KernelCase]:
    for ctx, rows in chunks:
        in_place = KernelCase(metric="prefill_attention", tier="vram", ctx_tokens=ctx, rows=rows)
        yield in_place
        yield replace(in_place, metric="prefill_select")
        yield replace(in_place, tier="host", rows=96)
        for bucket in buckets:
            if bucket < ctx:
                for copies in ("serial", "overlapped"):
                    yield replace(in_place, tier="host", mode="staged", bucket_tokens=bucket, copies=copies)


def _cpu_grid(*, quick: bool) -> Iterator[KernelCase]:
    yield from (
        case
        for case in _decode_cases((6_145, 12_288, 24_576) if quick else (6_145, 12_288, 24_576, 98_306), layers=2)
        if case.huge_pages
    )
    for ctx, rows in ((12_288, 48), (12_288, 96)) if quick else ((12_288, 48), (12_288, 96), (49_152, 192)):
        in_place = KernelCase(metric="prefill_attention", tier="vram", ctx_tokens=ctx, rows=rows)
        yield in_place
        yield replace(in_place, tier="host", mode="staged", bucket_tokens=6_144, copies="serial")
