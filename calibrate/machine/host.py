"""Host memory and disk: reading them, runs of them at random, and registering memory with a device."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from calibrate.machine.timed import scratch_file, timed
from calibrate.probes import Context, Probe, Sample, check, cuda_only
from realkernels.device import HostClock
from twin.units import GIB, KIB, MIB

DISK_THREADS = 16
CHUNK = 8 * MIB
REPEATS = 3


def host_read(context: Context) -> list[Sample]:
    """Sum of a large array by all cores, then random runs of it: many at once, and one alone."""
    size = (context.fitting([1 * GIB], free_bytes=context.machine.host_free_bytes, share=0.25) or [256 * MIB])[0]
    data = torch.ones(size // 4, dtype=torch.float32)
    total = torch.empty(())
    clocked = partial(context.seconds, clock=HostClock())

    def runs(run: int, count: int, **alone: int) -> Sample:
        table, target = data.view(-1, run // 4), torch.empty(count, run // 4)
        starts = torch.zeros(count, dtype=torch.int64)
        return timed(
            context, "host_read", at={"run_bytes": run, **alone}, moved_bytes=count * run, seconds=clocked,
            work=lambda: torch.index_select(table, 0, starts.random_(0, table.shape[0]), out=target),
            right=lambda: bool((target == 1).all()), how="all ones",
        )  # fmt: skip

    whole = timed(
        context, "host_read", lambda: torch.sum(data, dim=0, out=total), at={"run_bytes": size}, moved_bytes=size,
        seconds=clocked, right=lambda: abs(float(total) / data.numel() - 1) < 1e-3, how="the sum",
    )  # fmt: skip
    many = [runs(run, 8 * MIB // run) for run in context.points((64, 256, 1 * KIB, 4 * KIB, 16 * KIB))]
    return [whole, *many, runs(64, 1, alone=1)]


def _disk_seconds(
    handle: int, advice: int, prepare: Callable[[], object], work: Callable[[], object]
) -> tuple[float, ...]:
    """Wall seconds of each read of a file, whose pages are dropped from the cache before."""
    took = []
    for _ in range(REPEATS):
        prepare()
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(handle, 0, 0, advice)
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return tuple(took)


def disk_read(context: Context) -> list[Sample]:
    """A file from end to end after its pages were dropped from the cache."""
    size, block, buffer = context.pick(256 * MIB, 1024 * MIB), os.urandom(CHUNK), bytearray(CHUNK)
    with scratch_file(context.folder, size) as handle:
        _write(handle, size, block)

        def read() -> None:
            for first in range(0, size, CHUNK):
                os.preadv(handle, [buffer], first)

        sample = timed(
            context, "disk_read", read, at={"run_bytes": size}, moved_bytes=size,
            seconds=partial(_disk_seconds, handle, os.POSIX_FADV_SEQUENTIAL, bool),
            right=lambda: bytes(buffer) == block, how="the last block",
        )  # fmt: skip
    return [sample]


def disk_random_read(context: Context) -> list[Sample]:
    """Random runs of a file whose pages were dropped: one alone after the other, then many at once."""
    size = context.pick(256 * MIB, 1024 * MIB)
    points = ((4 * KIB, 1), (4 * KIB, DISK_THREADS), (32 * KIB, DISK_THREADS), (128 * KIB, DISK_THREADS))
    with scratch_file(context.folder, size) as handle, ThreadPoolExecutor(DISK_THREADS) as pool:
        _write(handle, size, os.urandom(CHUNK))
        some = partial(_random_reads, context, handle, size, pool=pool)
        return [some(run=run, threads=threads) for run, threads in context.points(points)]


def _random_reads(
    context: Context, handle: int, size: int, *, pool: ThreadPoolExecutor, run: int, threads: int
) -> Sample:
    count = 200 if threads == 1 else min(2048, size // run // 2)
    starts: list[int] = []
    lengths: list[list[int]] = []
    each = map if threads == 1 else pool.map

    def draw() -> None:
        starts[:] = (torch.randperm(size // run)[:count] * run).tolist()

    def read_one(first: int) -> int:
        return len(os.pread(handle, run, first))

    return timed(
        context, "disk_random_read", lambda: lengths.append(list(each(read_one, starts))),
        at={"run_bytes": run, "threads": threads, "reads": count}, moved_bytes=count * run,
        seconds=partial(_disk_seconds, handle, os.POSIX_FADV_RANDOM, draw),
        right=lambda: lengths == [[run] * count] * REPEATS, how="whole runs",
    )  # fmt: skip


def _write(handle: int, size: int, block: bytes) -> None:
    for first in range(0, size, len(block)):
        os.pwrite(handle, block, first)
    os.fsync(handle)


def host_register(context: Context) -> list[Sample]:
    """Mapping, registering and releasing host memory, by page size."""
    from realkernels.caches.host_memory import registered  # noqa: PLC0415 - needs CUDA

    samples = []
    size = min(context.pick(1 * GIB, 4 * GIB), context.machine.host_free_bytes // 4)
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
