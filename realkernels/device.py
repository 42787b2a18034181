"""The device that things are timed on: work made cheap to repeat, a clock, and how often it is asked.

On CUDA the clock is the device's events around the replay of a graph; on the CPU it is the host's clock, without the
time in which other processes had the core.
"""

import ctypes
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

HOLD_CYCLES = 400_000
"""About 0.2 ms of a GPU's clock: longer than it takes to launch a graph."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt in glibc."""

MOST_BYTES = 2**31 - 1
LARGEST_KEPT_BYTES = 2**25
"""The most that glibc accepts."""


class Device:
    """A device and its clock."""

    name: str
    """"cuda" or "cpu"."""
    device: torch.device
    rounds: int
    """How many times, apart from each other, a thing is timed: once where nobody shares the device."""

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work` made cheap to repeat: a CUDA graph's replay, or `work` itself on the CPU."""
        raise NotImplementedError

    def seconds(
        self, work: Callable[[], object], *, repeats: int, warm_up: int = 3, before: Callable[[], object] | None = None
    ) -> list[float]:
        """Seconds of each of `repeats` runs, after `warm_up` untimed ones; `before` prepares each, untimed."""
        samples = []
        for index in range(-warm_up, repeats):
            if before is not None:
                before()
            seconds = self._once(work)
            if index >= 0:
                samples.append(seconds)
        return samples

    def _once(self, work: Callable[[], object]) -> float:
        raise NotImplementedError


class CudaDevice(Device):
    """One CUDA device, which becomes the current one; RuntimeError in one line where it is not there."""

    name = "cuda"
    rounds = 1

    def __init__(self, device: torch.device) -> None:
        self.device = usable_device(device)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """The replay of a graph of what `work` launches; it is run once before, so that nothing compiles meanwhile."""
        work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        torch.cuda.synchronize(self.device)
        replay: Callable[[], object] = graph.replay
        return replay

    def _once(self, work: Callable[[], object]) -> float:
        """Between events on the current stream.

        The device is held back until the run is queued, so that the host's launching is not timed where it keeps ahead.
        """
        torch.cuda._sleep(HOLD_CYCLES)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


class HostClock(Device):
    """The host's own clock, for work that waits for the device by itself."""

    def _once(self, work: Callable[[], object]) -> float:
        return host_seconds(work)


class CpuDevice(HostClock):
    """The CPU. torch is told, process-wide, to compute with `threads` threads, and freed memory stays with the process.

    None leaves one core to copying threads and to whatever else runs: a parallel loop waits for its slowest thread,
    which on a busy machine takes a time slice.
    """

    name = "cpu"
    device = torch.device("cpu")
    rounds = 2
    """A processor is shared with whatever else runs: one moment is not like the next."""

    def __init__(self, *, threads: int | None = None) -> None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1) if threads is None else threads)
        keep_freed_memory()

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """`work` itself: there is nothing to capture."""
        return work


def open_device(name: str) -> Device:
    """The device called "cuda", "cuda:0", ... or "cpu".

    RuntimeError in one line where there is none: no GPU, torch without CUDA, an old driver, no triton.
    """
    if name == "cpu":
        return CpuDevice()
    if find_spec("triton") is None:
        raise RuntimeError(f"triton is not installed, without which there are no kernels for {name}: use device cpu")
    return CudaDevice(torch.device(name))


def usable_device(device: torch.device) -> torch.device:
    """`device` with its number, made current. RuntimeError in one line where there is none that kernels can run on."""
    if device.type != "cuda":
        raise RuntimeError(f"no kernels for device {device}: there are cuda and cpu")
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA: install a CUDA build, or use device cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver is reported below, once
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise RuntimeError(f"no usable GPU: {_why_not()}; use device cpu to go without")
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= found:
        raise RuntimeError(f"there is no GPU {number}: this machine has {found}, numbered from 0")
    usable = torch.device("cuda", number)
    major, minor = torch.cuda.get_device_capability(usable)
    if major < 7:
        name = torch.cuda.get_device_name(usable)
        raise RuntimeError(f"{name} has compute capability {major}.{minor}; the kernels need 7.0: use device cpu")
    torch.cuda.set_device(usable)
    return usable


def _why_not() -> str:
    """What torch says about a CUDA that does not start, cut to its first sentence."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    return "torch sees no device"


@contextmanager
def vram_for(what: str, nbytes: int, device: torch.device) -> Iterator[None]:
    """Where `what`, which needs `nbytes`, does not fit the device: RuntimeError in one line with what is free."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        raise RuntimeError(
            f"{what} needs {nbytes / 2**30:.2f} GiB of VRAM, {torch.cuda.get_device_name(device)} has "
            f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free: try a shorter context or fewer layers"
        ) from None


def host_seconds(work: Callable[[], object]) -> float:
    """Of `work`, by the host's clock, without the time in which a thread was ready and other processes had its core.

    What is left is at least what the calling thread computed for, and holds all waiting for files or other threads.
    """
    waited, computed, start = queued_seconds(), time.thread_time(), time.perf_counter()
    work()
    wall_s, computed_s = time.perf_counter() - start, time.thread_time() - computed
    return undisturbed_seconds(wall_s, computed_s, waited, queued_seconds())


def queued_seconds() -> dict[str, float]:
    """By thread of this process: seconds in which it was ready to run and had no core. Empty where nobody counts them.

    The second number of a thread's `schedstat`, in nanoseconds: https://docs.kernel.org/scheduler/sched-stats.html
    """
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return {}
    queued = {}
    for thread in threads:
        try:
            counted = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii")
            queued[thread] = int(counted.split()[1]) * 1e-9
        except (OSError, IndexError):  # it ended meanwhile, or this kernel does not count
            continue
    return queued


def undisturbed_seconds(wall_s: float, computed_s: float, before: dict[str, float], after: dict[str, float]) -> float:
    """`wall_s` without the wait of the thread that waited longest for a core, and no less than `computed_s`.

    Threads wait side by side: all of their waits together may be longer than the run.
    """
    waited_s = max((seconds - before.get(thread, 0.0) for thread, seconds in after.items()), default=0.0)
    return max(wall_s - waited_s, min(wall_s, computed_s))


def keep_freed_memory() -> bool:
    """Let blocks of up to 32 MiB be used again without asking the kernel; whether the C library does so.

    By default glibc decides from what was freed before. A temporary tensor then costs nothing in one process and as
    many page faults as it has pages in another, which is up to 40 % of a kernel's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return bool(mallopt(TRIM_THRESHOLD, MOST_BYTES)) and bool(mallopt(MMAP_THRESHOLD, LARGEST_KEPT_BYTES))
