"""Runs kernel cases on a backend: fresh data before every repeat, the result checked after the last one."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from calibrate.kernel_cases import DECODE, KernelCase

if TYPE_CHECKING:
    from realkernels.caches.qsa import QsaCache
    from realkernels.device import Device

WORST_ERROR = 2e-2
"""Largest relative error against float64 of an output in half precision that is still called right."""

LEAST_MEASURED_S = 0.25
MOST_REPEATS, LEAST_REPEATS = 30, 5


class WrongResult(RuntimeError):
    """A kernel was timed and computed something else than it should; its time is worth nothing."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds of one case."""

    case: KernelCase
    median_s: float
    spread: float
    """Relative standard deviation of the repeats, from their quartiles."""
    samples_s: tuple[float, ...]
    error: float
    """Worst relative error of the checked outputs against float64."""
    link_bytes: int


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A case that this machine could not run, and why."""

    case: KernelCase
    reason: str


def measure(
    cases: Iterable[KernelCase], backend: "Device", *, progress: Callable[[KernelCase], None] | None = None
) -> Iterator[Measurement | LeftOut]:
    """Measure the cases, those that share planes together; planes that do not fit leave theirs out."""
    for group in _groups(list(cases)):
        opened = partial(_planes_of, group, backend)
        yield from together(group, opened, partial(measure_case, backend=backend), progress)


@contextmanager
def _planes_of(group: Sequence[KernelCase], backend: "Device") -> "Iterator[QsaCache]":
    """Planes that hold every case of a group, filled."""
    tokens = -(-max(case.ctx_tokens for case in group) // 256) * 256
    layers = group[0].layers if group[0].metric in DECODE else 1
    from realkernels.caches.qsa import qsa_cache  # noqa: PLC0415
    from realkernels.shape import QsaShape  # noqa: PLC0415

    with qsa_cache(
        QsaShape(), layers=layers, tokens=tokens, tier=group[0].tier, huge_pages=group[0].huge_pages,
        device=backend.device,
    ) as cache:  # fmt: skip
        cache.fill_random(seed=tokens)
        yield cache


def together(
    group: Sequence[KernelCase], opened: Callable[[], AbstractContextManager[Any]],
    measured: Callable[..., Measurement], progress: Callable[[KernelCase], None] | None,
) -> Iterator[Measurement | LeftOut]:  # fmt: skip
    """Measure cases over one cache, which `opened` makes and which is closed after them.

    Where it does not fit, or a case needs more than there is, what was not measured yet is left out with the reason.
    """
    waiting = list(group)
    try:
        with opened() as cache:
            for case in group:
                if progress is not None:
                    progress(case)
                made = measured(case, cache=cache)
                waiting.remove(case)
                yield made
    except (MemoryError, RuntimeError) as refused:
        if isinstance(refused, WrongResult):
            raise
        for case in waiting:
            yield LeftOut(case=case, reason=(str(refused) or type(refused).__name__).splitlines()[0])


def measure_case(case: KernelCase, backend: "Device", cache: "QsaCache") -> Measurement:
    """One case on planes that hold at least its context. Raises WrongResult if the timed kernel is wrong."""
    call = timed_call(case, cache)
    call.run()
    # A fresh selection of a whole chunk before each repeat would take longer than what is timed.
    before = call.poison if case.metric in DECODE else call.blank
    samples = samples_of(backend, backend.capture(call.run), before)
    return measurement_of(case, samples, call.error(), int(call.link_bytes) if case.mode == "staged" else 0)


def timed_call(case: KernelCase, cache: "QsaCache") -> Any:
    """What is timed of a case."""
    from realkernels.timed import sparse  # noqa: PLC0415

    ctx_tokens = case.ctx_tokens
    if case.metric == "decode_step":
        return sparse.DecodeStep(cache, ctx_tokens=ctx_tokens, backbone_bytes=case.backbone_bytes)
    if case.metric == "decode_select":
        return sparse.DecodeSelect(cache, ctx_tokens=ctx_tokens)
    if case.metric == "decode_gather":
        return sparse.DecodeGather(cache, ctx_tokens=ctx_tokens)
    if case.metric == "prefill_select":
        return sparse.PrefillSelect(cache, ctx_tokens=ctx_tokens, q_tokens=case.rows)
    return sparse.PrefillAttend(
        cache, ctx_tokens=ctx_tokens, q_tokens=case.rows, bucket_tokens=case.bucket_tokens, copies=case.copies
    )


def samples_of(backend: "Device", work: Callable[[], object], before: Callable[[], object] | None) -> tuple[float, ...]:
    """Seconds of each of up to 30 repeats, fewer where they are long; of as many rounds as the backend asks for."""
    once = backend.seconds(work, repeats=1, warm_up=2, before=before)[0]
    wanted = max(LEAST_REPEATS, min(MOST_REPEATS, int(LEAST_MEASURED_S / max(once, 1e-6))))
    repeats = -(-wanted // backend.rounds)
    return tuple(backend.seconds(work, repeats=repeats, warm_up=0, before=before))


def measurement_of(case: KernelCase, samples: tuple[float, ...], error: float, link_bytes: int) -> Measurement:
    """Median and spread; WrongResult where the error says that something else was computed."""
    if not error <= WORST_ERROR:
        raise WrongResult(f"{case.id}: relative error {error:.3g} against float64, at most {WORST_ERROR:g} is right")
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (median, median, median)
    return Measurement(
        case=case,
        median_s=median,
        spread=(high - low) / 1.349 / median,  # the quartiles of a normal distribution lie 1.349 deviations apart
        samples_s=samples,
        error=error,
        link_bytes=link_bytes,
    )


def joined_measurement(rounds: Sequence[Measurement]) -> Measurement:
    """One measurement of the repeats of all rounds of a case."""
    samples = tuple(sample for each in rounds for sample in each.samples_s)
    worst = max(each.error for each in rounds)
    return measurement_of(rounds[0].case, samples, worst, rounds[0].link_bytes)


def _groups(cases: list[KernelCase]) -> Iterator[list[KernelCase]]:
    """Cases that can share planes: same tier, page size and layers (prefill runs one)."""
    keys: dict[tuple[str, bool, int], list[KernelCase]] = {}
    for case in cases:
        layers = case.layers if case.metric in DECODE else 1
        keys.setdefault((case.tier, case.huge_pages, layers), []).append(case)
    yield from keys.values()
