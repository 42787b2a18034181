"""The gather of a decode step over quantised records in host memory, format by format, all layers in one graph.

Rotations of queries and outputs are part of a call, and so of its latency. Selections are fresh before each repeat, the
result is checked against float64 attention over the unpacked selection.
"""

from functools import partial

from calibrate.probes.machine import Machine
from calibrate.probes.planes import MIB_TOKENS, SHAPE, WORST_ERROR, decode_plan
from calibrate.probes.probe import Context, Probe, Sample, check
from realkernels.caches.interleaved import InterleavedCache, interleaved_cache
from realkernels.codecs import codec_named
from realkernels.shape import QsaShape
from realkernels.timed.gather_blocks import GatherBlocks
from twin.engines.twin import RECORDS

BUDGET_CTX = 2**15
"""Context at which the selection's size is varied, to tell the fixed part of a gather from its bytes."""

POWERS = (12, 15, 18, 20)
LEAST_CAPABILITY = (8, 0)
QUICK_LAYERS = 4
WIDE_BITS = 6
"""Bits an element beyond which a format has twice the bytes to register."""


def gather(context: Context, *, name: str) -> list[Sample]:
    """Over contexts of powers of two, then over sizes of the selection."""
    plan = decode_plan(context, "host", most_tokens=MIB_TOKENS if context.cuda else context.pick(2**15, 2**18))
    contexts = [ctx for ctx in plan.contexts if ctx in {2**power for power in POWERS}]
    layers = min(plan.layers, QUICK_LAYERS) if context.quick else plan.layers
    given = {"layers": layers, "device": context.backend.device, "folder": str(context.folder)}
    samples = []
    with interleaved_cache(name, shape=SHAPE, tokens=contexts[-1], **given) as cache:
        for ctx in context.points(contexts):
            samples.append(_gathered(context, cache, ctx))
    for budget in context.points(context.pick((128,), (128, 512, 1024))):
        with interleaved_cache(name, shape=QsaShape(budget=budget), tokens=BUDGET_CTX, **given) as cache:
            samples.append(_gathered(context, cache, BUDGET_CTX))
    return samples


def _gathered(context: Context, cache: InterleavedCache, ctx: int) -> Sample:
    timed, layers = GatherBlocks(cache, ctx_tokens=ctx), len(cache.layers)
    where = f"{cache.codec_name} at {ctx}"
    error = timed.verify()
    check(where, error <= WORST_ERROR, f"relative error {error:.1e}")
    work = context.backend.capture(timed.run)
    seconds = context.seconds(work, before=timed.poison, per=layers)
    error = timed.error()
    how = check(where, error <= WORST_ERROR, f"output's relative error {error:.1e}")
    at: dict[str, int | float | str] = {
        "format": cache.codec_name, "ctx_tokens": ctx, "layers": layers, "budget": cache.shape.budget
    }  # fmt: skip
    return Sample(at=at, seconds=seconds, moved_bytes=timed.link_bytes, checked=how)


def _supported(machine: Machine) -> str:
    if not machine.is_cuda or tuple(int(part) for part in machine.compute_capability.split(".")) >= LEAST_CAPABILITY:
        return ""
    return f"the kernel needs compute capability 8.0, this device has {machine.compute_capability}"


def _probe(name: str) -> Probe:
    bits = 4 * codec_named(name).token_bytes(SHAPE.kv_heads, SHAPE.head_dim) / (SHAPE.kv_heads * SHAPE.head_dim)
    quick_s, full_s = (4.0, 9.0) if bits > WIDE_BITS else (3.5, 8.0)
    run = partial(gather, name=name)
    return Probe(name=f"gather_host_{name}", run=run, supported=_supported, quick_s=quick_s, full_s=full_s)


PROBES = tuple(_probe(name) for name in RECORDS)
