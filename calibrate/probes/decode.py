"""The kernels of a decode step: selection and sparse gather of several layers in one graph, per layer."""

from collections.abc import Iterator
from functools import partial

from calibrate.probes.machine import Machine
from calibrate.probes.planes import MIB_TOKENS, WORST_ERROR, Tier, decode_plan, planes
from calibrate.probes.probe import Context, Probe, Sample, check, cuda_only
from realkernels.caches.qsa import QsaCache
from realkernels.shape import QsaShape
from realkernels.timed.call import TimedCall
from realkernels.timed.sparse import DecodeGather, DecodeSelect

BUDGET_CTX = 2**15
"""Context at which the selection's size is varied, to tell the fixed part of a gather from its bytes."""


def select(context: Context) -> list[Sample]:
    """Selection of all layers over contexts."""
    most = context.pick(MIB_TOKENS, 2 * MIB_TOKENS) if context.cuda else context.pick(2**15, 2**18)
    plan = decode_plan(context, "vram", most_tokens=most)
    samples = []
    with planes(context, layers=plan.layers, tokens=plan.contexts[-1], tier="vram") as cache:
        cache.fill_random(seed=1)
        for ctx in context.points(plan.contexts):
            at = {"ctx_tokens": ctx, "layers": plan.layers}
            samples.append(_sample(context, "select", DecodeSelect(cache, ctx_tokens=ctx), at))
        del cache
    return samples


def _sample(context: Context, name: str, call: TimedCall, at: dict[str, int]) -> Sample:
    """Timed on fresh data before each repeat, checked after the last one."""
    call.run()
    seconds = context.seconds(context.backend.capture(call.run), before=call.poison, per=call.calls)
    error = call.error()
    how = check(name, error <= WORST_ERROR, f"selection exact, output's relative error {error:.1e}")
    return Sample(at=at, seconds=seconds, moved_bytes=call.moved_bytes, checked=how)


def gather(context: Context, *, tier: Tier, huge_pages: bool) -> list[Sample]:
    """Sparse attention of all layers over fresh selections: over contexts, then over sizes of the selection."""
    most = MIB_TOKENS if context.quick or not huge_pages else 2 * MIB_TOKENS
    if not context.cuda:
        most = context.pick(2**15, 2**18)
    plan = decode_plan(context, tier, most_tokens=most)
    layers = min(plan.layers, 4) if context.quick and tier == "host" else plan.layers  # registering takes its time
    name = f"gather_{tier}"
    samples = []
    opened = partial(planes, context, layers=layers, tier=tier, huge_pages=huge_pages)
    with opened(tokens=plan.contexts[-1]) as cache:
        cache.fill_random(seed=2)
        for ctx in context.points(plan.contexts):
            samples.append(_gathered(context, cache, ctx, name))
        del cache
    for shape in context.points(_budgets(context)):
        with opened(tokens=BUDGET_CTX, shape=shape) as cache:
            cache.fill_random(seed=3)
            samples.append(_gathered(context, cache, BUDGET_CTX, name))
            del cache
    return samples


def _budgets(context: Context) -> Iterator[QsaShape]:
    for budget in context.pick((128,), (128, 512, 1024)):
        yield QsaShape(budget=budget)


def _gathered(context: Context, cache: QsaCache, ctx: int, name: str) -> Sample:
    at = {"ctx_tokens": ctx, "layers": cache.layers, "budget": cache.shape.budget}
    return _sample(context, name, DecodeGather(cache, ctx_tokens=ctx), at)


def _pages(machine: Machine) -> str:
    return (
        cuda_only(machine) and "needs a CUDA device: the CPU's offload tier is a mapped file without a choice of pages"
    )


_HOST = partial(gather, tier="host")
PROBES = (
    Probe(name="select", run=select, quick_s=6, full_s=25),
    Probe(name="gather_vram", run=partial(gather, tier="vram", huge_pages=True), quick_s=4, full_s=25),
    Probe(name="gather_host", run=partial(_HOST, huge_pages=True), quick_s=6.5, full_s=65),
    Probe(name="gather_host_4k", run=partial(_HOST, huge_pages=False), supported=_pages, quick_s=7, full_s=25),
)
