"""Timing: events on a device or the wall clock around what is timed, warm-up first, raw samples kept."""

import time
from collections.abc import Callable

import torch

HOLD_CYCLES = 400_000
"""About 0.2 ms of a GPU's clock: longer than it takes to launch a graph."""


def event_seconds(
    run: Callable[[], object], *, repeats: int, warm_up: int = 3, before: Callable[[int], object] | None = None
) -> list[float]:
    """Seconds of each of `repeats` runs on the current stream; `before(i)` prepares run i outside the timed part.

    The device is held back until the run is queued, so that the host's launching is not timed where it keeps ahead.
    """
    samples = []
    for index in range(-warm_up, repeats):
        if before is not None:
            before(index)
        torch.cuda._sleep(HOLD_CYCLES)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if index >= 0:
            samples.append(start.elapsed_time(stop) * 1e-3)
    return samples


def clock_seconds(
    work: Callable[[], object], *, repeats: int, warm_up: int = 3, before: Callable[[int], object] | None = None
) -> list[float]:
    """Seconds of each of `repeats` runs by the wall clock; `before(i)` prepares run i outside the timed part."""
    samples = []
    for index in range(-warm_up, repeats):
        if before is not None:
            before(index)
        start = time.perf_counter()
        work()
        if index >= 0:
            samples.append(time.perf_counter() - start)
    return samples


def capture(step: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `step` launches; it is run once before, so that nothing compiles during the capture."""
    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize(device)
    return graph
