"""Runs format cases on a device: a cache for each, fresh queries before every repeat, the result checked at the end."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from calibrate.kernel_cases import KernelCase
from calibrate.measure import LeftOut, Measurement, measurement_of, samples_of
from calibrate.measure_records import measure_records
from twin.format_ops import heads_of

if TYPE_CHECKING:
    from realkernels.device import Device
    from realkernels.timed.attend_decode import AttendDecode
    from realkernels.timed.prefill import AttendChunk


def measure_formats(
    cases: Iterable[KernelCase], backend: "Device", *, progress: Callable[[KernelCase], None] | None = None
) -> Iterator[Measurement | LeftOut]:
    """Measure the cases one by one; what the device has no kernel or no room for is left out with the reason.

    Raises WrongResult where a kernel computes something else than attention over the unpacked cache.
    """
    every = list(cases)
    waiting = [case for case in every if not case.of_records]
    if backend.device.type == "cuda":
        _compile(waiting, backend)
    for case in waiting:
        if progress is not None:
            progress(case)
        try:
            timed = _opened(case, backend)
        except (MemoryError, RuntimeError) as refused:
            yield LeftOut(case=case, reason=(str(refused) or type(refused).__name__).splitlines()[0])
        else:
            yield measure_format(case, backend, timed)
            del timed
        _release()
    yield from measure_records([case for case in every if case.of_records], backend, progress=progress)


def _compile(cases: list[KernelCase], backend: "Device") -> None:
    """All kernels side by side; one that does not compile says so when its case is run."""
    from realkernels.codecs import default_arrangement  # noqa: PLC0415
    from realkernels.timed.compile_ahead import Wanted, compile_ahead  # noqa: PLC0415

    compile_ahead(
        [
            Wanted(case.format, "inline" if case.inline else default_arrangement(case.format), case.rows)
            for case in cases
            if case.metric == "decode_format"
        ],
        device=str(backend.device),
    )


def _opened(case: KernelCase, backend: "Device") -> "AttendDecode | AttendChunk":
    """Caches of the case, filled, and its first run: that is where memory runs out or a kernel does not start."""
    from realkernels.shape import AttentionShape  # noqa: PLC0415
    from realkernels.timed.attend_decode import AttendDecode  # noqa: PLC0415
    from realkernels.timed.prefill import AttendChunk  # noqa: PLC0415

    given = {
        "arrangement": "inline" if case.inline else None,
        "shape": AttentionShape(**heads_of(case.heads)._asdict()),
        "ctx_tokens": case.ctx_tokens,
        "device": backend.device,
    }
    timed: AttendDecode | AttendChunk
    if case.metric == "prefill_format":
        timed = AttendChunk(case.format, q_tokens=case.rows, **given)
    else:
        timed = AttendDecode(case.format, batch=case.batch, q_tokens=case.rows, **given)
    timed.run()
    return timed


def measure_format(case: KernelCase, backend: "Device", timed: "AttendDecode | AttendChunk") -> Measurement:
    """Seconds of one call, its rotations included. WrongResult where the last one was wrong."""
    work = backend.capture(timed.run)
    samples = samples_of(backend, work, timed.poison)
    return measurement_of(case, tuple(sample / timed.calls for sample in samples), timed.error(), 0)


def _release() -> None:
    """The next case's caches may be as large as all that is free."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
