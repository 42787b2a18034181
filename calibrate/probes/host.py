"""Host memory and disk: reading them, runs of them at random, and registering memory with a device."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from calibrate.probes.memory import MIB
from calibrate.probes.probe import Context, Probe, Sample, check, cuda_only
from calibrate.probes.tiers import scratch_file
from realkernels.device import host_seconds

KIB, GIB = 2**10, 2**30
DISK_THREADS = 16
CHUNK = 8 * MIB


def host_read(context: Context) -> list[Sample]:
    """Sum of a large array by all cores, then random runs of it."""
    size = context.fitting([1 * GIB], free_bytes=context.machine.host_free_bytes, share=0.25)[0:1]
    data = torch.ones((size[0] if size else 256 * MIB) // 4, dtype=torch.float32)
    nbytes = data.numel() * 4
    result = torch.empty(())
    seconds = _clocked(context, lambda: torch.sum(data, dim=0, out=result))
    how = check("host_read", abs(float(result) / data.numel() - 1) < 1e-3, "the sum")
    samples = [Sample(at={"run_bytes": nbytes}, seconds=seconds, moved_bytes=nbytes, checked=how)]
    for run in context.points((64, 256, 1 * KIB, 4 * KIB, 16 * KIB)):
        table = data.view(-1, run // 4)
        runs = 8 * MIB // run
        target = torch.empty(runs, run // 4)
        starts = torch.randint(0, table.shape[0], (runs,))

        def pick(table: torch.Tensor = table, starts: torch.Tensor = starts, target: torch.Tensor = target) -> None:
            torch.index_select(table, 0, starts.random_(0, table.shape[0]), out=target)

        seconds = _clocked(context, pick)
        how = check("host_read", bool((target == 1).all()), "all ones")
        samples.append(Sample(at={"run_bytes": run}, seconds=seconds, moved_bytes=runs * run, checked=how))
    single = torch.empty(1, 16)
    start = torch.zeros(1, dtype=torch.int64)
    table = data.view(-1, 16)
    seconds = _clocked(context, lambda: torch.index_select(table, 0, start.random_(0, table.shape[0]), out=single))
    samples.append(Sample(at={"run_bytes": 64, "alone": 1}, seconds=seconds, moved_bytes=64))
    return samples


def _clocked(context: Context, work: Callable[[], object]) -> tuple[float, ...]:
    """Seconds of host work, by the host's clock."""
    work()
    return tuple(host_seconds(work) for _ in range(context.pick(5, 11)))


def disk_read(context: Context) -> list[Sample]:
    """A file from end to end after its pages were dropped from the cache."""
    size = context.pick(256 * MIB, 1024 * MIB)
    block = os.urandom(CHUNK)
    with scratch_file(context.folder, size) as handle:
        _write(handle, size, block)
        seconds = []
        buffer = bytearray(CHUNK)
        for _ in range(3):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            begin = time.perf_counter()
            for first in range(0, size, CHUNK):
                os.preadv(handle, [buffer], first)
            seconds.append(time.perf_counter() - begin)
        how = check("disk_read", bytes(buffer) == block, "the last block")
    return [Sample(at={"run_bytes": size}, seconds=tuple(seconds), moved_bytes=size, checked=how)]


def disk_random_read(context: Context) -> list[Sample]:
    """Random runs of a file whose pages were dropped: many at once, then one alone after the other."""
    size = context.pick(256 * MIB, 1024 * MIB)
    samples = []
    with scratch_file(context.folder, size) as handle, ThreadPoolExecutor(DISK_THREADS) as pool:
        _write(handle, size, os.urandom(CHUNK))
        for run, threads in context.points(
            ((4 * KIB, 1), (4 * KIB, DISK_THREADS), (32 * KIB, DISK_THREADS), (128 * KIB, DISK_THREADS))
        ):
            count = 200 if threads == 1 else min(2048, size // run // 2)
            seconds = []
            for _ in range(3):
                starts = (torch.randperm(size // run)[:count] * run).tolist()
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
                begin = time.perf_counter()
                if threads == 1:
                    found = [len(os.pread(handle, run, first)) for first in starts]
                else:
                    found = list(pool.map(lambda first, run=run: len(os.pread(handle, run, first)), starts))
                seconds.append(time.perf_counter() - begin)
                check("disk_random_read", found == [run] * count, "whole runs")
            at: dict[str, int | float | str] = {"run_bytes": run, "threads": threads, "reads": count}
            samples.append(Sample(at=at, seconds=tuple(seconds), moved_bytes=count * run, checked="whole runs"))
    return samples


def _write(handle: int, size: int, block: bytes) -> None:
    for first in range(0, size, len(block)):
        os.pwrite(handle, block, first)
    os.fsync(handle)


def host_register(context: Context) -> list[Sample]:
    """Mapping, registering and releasing host memory, by page size."""
    from realkernels.caches.host_memory import registered  # noqa: PLC0415

    samples = []
    size = context.pick(1 * GIB, 4 * GIB)
    size = min(size, context.machine.host_free_bytes // 4)
    for pages in context.points(("huge", "4KiB")):
        seconds = []
        for _ in range(2 if context.quick else 3):
            begin = time.perf_counter()
            with registered(size, device=context.backend.device, huge_pages=pages == "huge") as slab:
                seconds.append(time.perf_counter() - begin)
                slab.device[-1:].fill_(7)
                torch.cuda.synchronize(context.backend.device)
                check("host_register", int(slab.host[-1]) == 7, "a byte written by the device is read by the host")
                del slab
        samples.append(Sample(at={"pages": pages}, seconds=tuple(seconds), moved_bytes=size, checked="a byte"))
    return samples


PROBES = (
    Probe(name="host_read", run=host_read, quick_s=2, full_s=6),
    Probe(name="disk_read", run=disk_read, quick_s=3, full_s=10),
    Probe(name="disk_random_read", run=disk_random_read, quick_s=3, full_s=10),
    Probe(name="host_register", run=host_register, supported=cuda_only, quick_s=3, full_s=14),
)
