"""The kernels of a decode step: selection and sparse gather of several layers in one graph, per layer."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from calibrate.machine.description import Machine
from calibrate.probes.planes import MIB_TOKENS, SHAPE, WORST_ERROR, Tier, decode_plan, element_bytes
from calibrate.probes.probe import Context, Probe, Sample, check, cuda_only
from realkernels.shape import QsaShape

if TYPE_CHECKING:
    from realkernels.backend import DecodeStep, QsaCache

BUDGET_CTX = 2**15
"""Context at which the selection's size is varied, to tell the fixed part of a gather from its bytes."""


def select(context: Context) -> list[Sample]:
    """Selection of all layers over contexts."""
    most = context.pick(MIB_TOKENS, 2 * MIB_TOKENS) if context.cuda else context.pick(2**15, 2**18)
    plan = decode_plan(context, "vram", most_tokens=most)
    samples = []
    with context.backend.cache(SHAPE, layers=plan.layers, tokens=plan.contexts[-1], tier="vram") as cache:
        cache.fill_random(seed=1)
        for ctx in context.points(plan.contexts):
            step = context.backend.decode_step(cache, end=ctx)
            step.select()
            work = context.backend.capture(step.select)
            seconds = context.seconds(work, before=partial(_refresh, step), per=plan.layers)
            step.gather()
            at: dict[str, int | float | str] = {"ctx_tokens": ctx, "layers": plan.layers}
            moved = ctx // SHAPE.ratio * SHAPE.index_dim * element_bytes(context)
            samples.append(Sample(at=at, seconds=seconds, moved_bytes=moved, checked=_verify("select", step)))
        del cache
    return samples


def _refresh(step: "DecodeStep", _index: int) -> None:
    step.query.normal_()
    step.index_query.normal_()
    step.selected.fill_(-1)
    step.output.fill_(float("nan"))


def _refresh_selected(step: "DecodeStep", index: int) -> None:
    _refresh(step, index)
    step.select()


def _verify(name: str, step: "DecodeStep") -> str:
    exact, error = step.verify()
    return check(name, exact and error <= WORST_ERROR, f"selection exact: {exact}; output's relative error {error:.1e}")


def gather(context: Context, *, tier: Tier, huge_pages: bool) -> list[Sample]:
    """Sparse attention of all layers over fresh selections: over contexts, then over sizes of the selection."""
    most = MIB_TOKENS if context.quick or not huge_pages else 2 * MIB_TOKENS
    if not context.cuda:
        most = context.pick(2**15, 2**18)
    plan = decode_plan(context, tier, most_tokens=most)
    layers = min(plan.layers, 4) if context.quick and tier == "host" else plan.layers  # registering takes its time
    name = f"gather_{tier}"
    samples = []
    cached = context.backend.cache
    with cached(SHAPE, layers=layers, tokens=plan.contexts[-1], tier=tier, huge_pages=huge_pages) as cache:
        cache.fill_random(seed=2)
        for ctx in context.points(plan.contexts):
            samples.append(_gathered(context, cache, ctx, layers, name))
        del cache
    for shape in context.points(_budgets(context)):
        with cached(shape, layers=layers, tokens=BUDGET_CTX, tier=tier, huge_pages=huge_pages) as cache:
            cache.fill_random(seed=3)
            samples.append(_gathered(context, cache, BUDGET_CTX, layers, name))
            del cache
    return samples


def _budgets(context: Context) -> Iterator[QsaShape]:
    for budget in context.pick((128,), (128, 512, 1024)):
        yield QsaShape(budget=budget)


def _gathered(context: Context, cache: "QsaCache", ctx: int, layers: int, name: str) -> Sample:
    step = context.backend.decode_step(cache, end=ctx)
    _refresh_selected(step, 0)
    step.gather()
    work = context.backend.capture(step.gather)
    seconds = context.seconds(work, before=partial(_refresh_selected, step), per=layers)
    budget = cache.shape.budget
    moved = budget * 2 * SHAPE.kv_heads * SHAPE.head_dim * element_bytes(context)
    at: dict[str, int | float | str] = {"ctx_tokens": ctx, "layers": layers, "budget": budget}
    return Sample(at=at, seconds=seconds, moved_bytes=moved, checked=_verify(name, step))


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
