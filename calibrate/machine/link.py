"""The link to host memory: copies, alone, in a queue, pageable and both ways at once; and reads in place by kernels."""

import math
import time
from functools import partial
from itertools import chain
from typing import Any

import torch

from calibrate.machine.description import query_smi
from calibrate.machine.timed import Region, fill, host_region, timed
from calibrate.probes import Context, Probe, Sample, cuda_only
from twin.units import GIB, KIB, MIB

SINGLE = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
QUEUED = tuple((copies, size) for size in (MIB, 4 * MIB, 16 * MIB) for copies in (4, 16, 64))
BEYOND_CACHES = 64 * MIB
"""What a CPU has to move for its caches not to pass for a link: less is not timed there, nor more than once around."""
LOADED_S = 1.5
"""Least time that the link is kept busy while its state is asked for: nvidia-smi takes some tenths of a second."""
RUNS = (512, 1 * KIB, 2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB)
"""Bytes that lie together of what kernels read in place."""


def _buffer_bytes(context: Context) -> int:
    sizes = (64 * MIB, 256 * MIB) if context.quick else (64 * MIB, 256 * MIB, 1024 * MIB)
    return (context.fitting(sizes, free_bytes=context.machine.host_free_bytes, share=0.25) or [64 * MIB])[-1]


def _same(source: Any, target: Any, size: int) -> bool:
    """Whether the first `size` bytes are equal, once all copies are done."""
    for tensor in (source, target):
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
    return bool(torch.equal(source[:size].cpu(), target[:size].cpu()))


def one_way(context: Context, *, inwards: bool) -> list[Sample]:
    """Copies between registered host memory (on the CPU: a mapped file) and device memory, `inwards` to the device."""
    name, size = "host_to_device_copy" if inwards else "device_to_host_copy", _buffer_bytes(context)
    with host_region(context, size) as region:
        buffer = torch.empty(size, dtype=torch.uint8, device=context.backend.device)
        if inwards:
            samples = _copies(context, region.host, buffer, name=name)
            if context.cuda:
                rate = samples[-1].moved_bytes / samples[-1].median_s
                samples.append(_link_state(context, region, buffer, rate=rate))
        else:
            fill(buffer)
            samples = _copies(context, buffer, region.host, name=name)
        del region
    return samples


def _copies(context: Context, source: Any, target: Any, *, name: str) -> list[Sample]:
    """Copies source -> target, one by one over sizes, then queues of equal copies."""
    samples = []
    least, most = (0, math.inf) if context.cuda else (BEYOND_CACHES, target.numel())
    singles = [(1, size) for size in SINGLE if least <= size <= target.numel()]
    queues = [queue for queue in QUEUED if queue[1] <= target.numel() // 4 and least <= math.prod(queue) <= most]
    for copies, size in chain(context.points(singles), context.points(queues)):
        starts = [index % (target.numel() // size) * size for index in range(copies)]
        target[: max(starts) + size].zero_()

        def queue(starts: list[int] = starts, size: int = size) -> None:
            for first in starts:
                target[first : first + size].copy_(source[first : first + size], non_blocking=True)

        samples.append(timed(
            context, name, queue, at={"copies": copies, "copy_bytes": size}, moved_bytes=copies * size,
            right=partial(_same, source, target, max(starts) + size), how="equal",
        ))  # fmt: skip
    return samples


def _link_state(context: Context, region: Region, target: Any, *, rate: float) -> Sample:
    """Generation and width of the link while copies run: idle links are trained down to save power."""
    begin = time.monotonic()
    for _ in range(int(LOADED_S * rate / target.numel()) + 1):
        target.copy_(region.host, non_blocking=True)
    smi = query_smi(context.machine.device, context.machine.device_id)
    torch.cuda.synchronize(target.device)
    state = {key: value for key, value in smi.items() if key.startswith(("pcie", "clocks", "temperature"))}
    return Sample(at={"state": "loaded", **state}, seconds=(time.monotonic() - begin,))


def pageable(context: Context) -> list[Sample]:
    """Ordinary host memory to the device, which the driver copies through a pinned buffer of its own."""
    size = context.pick(64 * MIB, 256 * MIB)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8, device=context.backend.device)
    return [
        timed(
            context, "host_to_device_copy_pageable", partial(target[:part].copy_, source[:part]),
            at={"copies": 1, "copy_bytes": part},
            right=partial(_same, source, target, part), how="equal", moved_bytes=part
        )
        for part in context.points([MIB, 16 * MIB, size])
    ]  # fmt: skip


def duplex(context: Context) -> list[Sample]:
    """Both directions at once, on two streams; bytes are those of both."""
    size = _buffer_bytes(context) // 2
    with host_region(context, 2 * size) as region:
        sample = _both_ways(context, region.host[:size], region.host[size:])
        del region
    return [sample]


def _both_ways(context: Context, out: Any, back: Any) -> Sample:
    """Host memory `out` to the device, and as much of the device's to host memory `back`."""
    size, device = out.numel(), context.backend.device
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8, device=device)
    other = torch.cuda.Stream(device)

    def both() -> None:
        current = torch.cuda.current_stream(device)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            target.copy_(out, non_blocking=True)
        back.copy_(source, non_blocking=True)
        current.wait_stream(other)

    return timed(
        context, "device_to_host_copy_duplex", both, at={"copy_bytes": size}, moved_bytes=2 * size,
        right=lambda: _same(out, target, size) and _same(source, back, size), how="equal",
    )  # fmt: skip


# Host memory read in place


def host_to_device_read(context: Context) -> list[Sample]:
    """A kernel that reads registered host memory from end to end."""
    with host_region(context, context.pick(256 * MIB, 1024 * MIB)) as region:
        sample = _read(context, region)
        del region
    return [sample]


def _read(context: Context, region: Region) -> Sample:
    from calibrate.machine.kernels import Sum  # noqa: PLC0415 - needs triton

    size, total = region.host.numel(), Sum(region.device.view(torch.int32))

    def right() -> bool:
        wanted = int(region.host.view(torch.int32).sum(dtype=torch.int64))
        return (total.value() - wanted) % 2**32 == 0

    return timed(
        context, "host_to_device_read", total.run, at={"bytes": size}, moved_bytes=size, right=right,
        how="the sum modulo 2^32",
    )  # fmt: skip


def host_to_device_gather(context: Context) -> list[Sample]:
    """Random runs of host memory, fresh ones every time."""
    samples = []
    regions = _regions(context)
    for pages in ("huge", "4KiB") if context.cuda else ("file",):
        with host_region(context, regions[-1], huge_pages=pages == "huge") as region:
            points = [(size, run) for size in regions for run in context.pick((512, 4 * KIB, 64 * KIB), RUNS)]
            for size, run in context.points(sorted(points)):
                samples.append(_gather(context, region.device[:size], run, pages=pages))
            del region
    return samples


def _regions(context: Context) -> list[int]:
    if not context.cuda:
        return context.pick([256 * MIB], [64 * MIB, 1024 * MIB])
    wanted = context.pick([64 * MIB, 2 * GIB], [64 * MIB, 1 * GIB, 4 * GIB, 16 * GIB])
    return context.fitting(wanted, free_bytes=context.machine.host_free_bytes, share=0.3) or [64 * MIB]


def _gather(context: Context, data: Any, run: int, *, pages: str) -> Sample:
    """Reads 48 MiB (on the CPU 16 MiB) of runs of `run` bytes each."""
    runs = (48 * MIB if context.cuda else 16 * MIB) // run
    slots = data.numel() // run
    if context.cuda:
        from calibrate.machine.kernels import RunSums  # noqa: PLC0415 - needs triton

        table = data.view(torch.int32).view(-1, run // 4)
        sums = RunSums(data.view(torch.int32), run_bytes=run, runs=runs)
        starts, work, how = sums.starts, sums.run, "sums of 256 runs"

        def right() -> bool:
            wanted = table[starts[:256]].long().sum(dim=1)
            return bool(((sums.partial[:256].long() - wanted) % 2**32 == 0).all())
    else:
        table = data.view(torch.int64).view(-1, run // 8)
        starts, how = torch.zeros(runs, dtype=torch.int64), "equal"
        target = torch.empty(runs, run // 8, dtype=torch.int64)

        def work() -> None:
            torch.index_select(table, 0, starts, out=target)

        def right() -> bool:
            return bool(torch.equal(target, table[starts]))

    return timed(
        context, f"host_to_device_gather of {run} B", work, before=lambda: starts.random_(0, slots),
        at={"run_bytes": run, "region_bytes": data.numel(), "pages": pages}, moved_bytes=runs * run,
        right=right, how=how,
    )  # fmt: skip


PROBES = (
    Probe(name="host_to_device_copy", run=partial(one_way, inwards=True), quick_s=4, full_s=12),
    Probe(name="device_to_host_copy", run=partial(one_way, inwards=False), quick_s=3, full_s=12),
    Probe(name="host_to_device_copy_pageable", run=pageable, supported=cuda_only, quick_s=1.5, full_s=4),
    Probe(name="device_to_host_copy_duplex", run=duplex, supported=cuda_only, full_s=4),
    Probe(name="host_to_device_read", run=host_to_device_read, supported=cuda_only, full_s=4),
    Probe(name="host_to_device_gather", run=host_to_device_gather, quick_s=3.5, full_s=35),
)
