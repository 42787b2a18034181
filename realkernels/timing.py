"""Timing: events on a device or the host's clock around what is timed, warm-up first, raw samples kept."""

import os
import time
from collections.abc import Callable
from pathlib import Path

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
    """Seconds of each of `repeats` runs by the host's clock; `before(i)` prepares run i outside the timed part.

    Not counted is the time in which a thread was ready and other processes had its core: that is their time. What is
    left is at least what the calling thread computed for, and holds all waiting for files or for other threads.
    """
    samples = []
    for index in range(-warm_up, repeats):
        if before is not None:
            before(index)
        waited, computed, start = queued_seconds(), time.thread_time(), time.perf_counter()
        work()
        wall_s, computed_s = time.perf_counter() - start, time.thread_time() - computed
        if index >= 0:
            samples.append(undisturbed_seconds(wall_s, computed_s, waited, queued_seconds()))
    return samples


def queued_seconds() -> dict[str, float]:
    """By thread of this process: seconds in which it was ready to run and had no core. Empty where nobody counts them.

    The second number of a thread's `schedstat`, in nanoseconds: https://docs.kernel.org/scheduler/sched-stats.html
    """
    queued = {}
    for thread in _threads():
        try:
            queued[thread] = (
                int(Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
            )
        except (OSError, IndexError):  # it ended meanwhile, or this kernel does not count
            continue
    return queued


def _threads() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:
        return []


def undisturbed_seconds(wall_s: float, computed_s: float, before: dict[str, float], after: dict[str, float]) -> float:
    """`wall_s` without the wait of the thread that waited longest for a core, and no less than `computed_s`.

    Threads wait side by side: all of their waits together may be longer than the run.
    """
    waited_s = max((seconds - before.get(thread, 0.0) for thread, seconds in after.items()), default=0.0)
    return max(wall_s - waited_s, min(wall_s, computed_s))


def capture(step: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `step` launches; it is run once before, so that nothing compiles during the capture."""
    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize(device)
    return graph
