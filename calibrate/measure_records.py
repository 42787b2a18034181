"""Runs gathers over records in host memory: fresh selections before every repeat, the result checked at the end."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from calibrate.kernel_cases import KernelCase
from calibrate.measure import LeftOut, Measurement, measurement_of, samples_of, together

if TYPE_CHECKING:
    from realkernels.caches.interleaved import InterleavedCache
    from realkernels.device import Device


def measure_records(
    cases: Iterable[KernelCase], backend: "Device", *, progress: Callable[[KernelCase], None] | None = None
) -> Iterator[Measurement | LeftOut]:
    """Measure the cases, those of a format over the same records; records that do not fit leave theirs out.

    Raises WrongResult where a kernel computes something else than attention over the unpacked selection.
    """
    from realkernels.caches.interleaved import interleaved_cache  # noqa: PLC0415
    from realkernels.shape import QsaShape  # noqa: PLC0415

    for group in _groups(cases):
        given = {"layers": group[0].layers, "tokens": max(case.ctx_tokens for case in group), "device": backend.device}
        opened = partial(interleaved_cache, group[0].format, shape=QsaShape(), **given)
        yield from together(group, opened, partial(measure_gather, backend=backend), progress)


def measure_gather(case: KernelCase, backend: "Device", cache: "InterleavedCache") -> Measurement:
    """Seconds of all layers, rotations included. WrongResult where the last run was wrong."""
    from realkernels.timed.gather_blocks import GatherBlocks  # noqa: PLC0415

    timed = GatherBlocks(cache, ctx_tokens=case.ctx_tokens)
    timed.run()
    samples = samples_of(backend, backend.capture(timed.run), timed.poison)
    return measurement_of(case, samples, timed.error(), case.layers * int(timed.link_bytes))


def _groups(cases: Iterable[KernelCase]) -> list[list[KernelCase]]:
    groups: dict[tuple[str, int], list[KernelCase]] = {}
    for case in cases:
        groups.setdefault((case.format, case.layers), []).append(case)
    return list(groups.values())
