"""Device memory read and copied; the link to host memory by copies: alone, in a queue, pageable, both ways at once."""

import math
import time
from functools import partial
from itertools import chain
from typing import Any

import torch

from calibrate.machine.description import query_smi
from calibrate.machine.timed import Region, fill, host_region, timed
from calibrate.probes.probe import Context, Probe, Sample, cuda_only
from twin.units import KIB, MIB

SINGLE = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
QUEUED = tuple((copies, size) for size in (MIB, 4 * MIB, 16 * MIB) for copies in (4, 16, 64))
BEYOND_CACHES = 64 * MIB
"""What a CPU has to move for its caches not to pass for a link: less is not timed there, nor more than once around."""
LOADED_S = 1.5
"""Least time that the link is kept busy while its state is asked for: nvidia-smi takes some tenths of a second."""


def _vram_sizes(context: Context) -> list[int]:
    """Buffers well beyond any cache, two of which fit the free memory."""
    wanted = context.pick([1024 * MIB], [1024 * MIB, 4096 * MIB] if context.cuda else [1024 * MIB, 2048 * MIB])
    return context.fitting(wanted, free_bytes=context.machine.device_free_bytes, share=0.3) or [128 * MIB]


def vram_read(context: Context) -> list[Sample]:
    """Sum of a large buffer: every byte is read once, next to nothing is written."""
    return [_sum(context, size) for size in context.points(_vram_sizes(context))]


def _sum(context: Context, size: int) -> Sample:
    one = partial(timed, context, "vram_read", at={"bytes": size}, how="the sum", moved_bytes=size)
    if context.cuda:
        from calibrate.machine.kernels import Sum  # noqa: PLC0415 - needs triton

        data = torch.randint(0, 16, (size // 4,), dtype=torch.int32, device=context.backend.device)
        total = Sum(data)
        return one(total.run, right=lambda: total.value() == sum(int(part.sum()) for part in data.split(2**28)))
    numbers, result = torch.ones(size // 4, dtype=torch.float32), torch.empty(())
    work = partial(torch.sum, numbers, dim=0, out=result)
    return one(work, right=lambda: abs(float(result) / numbers.numel() - 1) < 1e-3)


def vram_copy(context: Context) -> list[Sample]:
    """Copy of a large buffer: bytes read plus bytes written."""
    (size,) = context.points(_vram_sizes(context)[:1])
    source = torch.empty(size, dtype=torch.uint8, device=context.backend.device)
    fill(source)
    target = torch.zeros_like(source)
    return [timed(
        context, "vram_copy", partial(target.copy_, source), at={"bytes": size}, moved_bytes=2 * size,
        right=lambda: torch.equal(source, target), how="all bytes equal",
    )]  # fmt: skip


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
    smi = query_smi(context.machine.smi_name)
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


PROBES = (
    Probe(name="vram_read", run=vram_read, quick_s=2, full_s=4),
    Probe(name="vram_copy", run=vram_copy, quick_s=1, full_s=5),
    Probe(name="host_to_device_copy", run=partial(one_way, inwards=True), quick_s=4, full_s=12),
    Probe(name="device_to_host_copy", run=partial(one_way, inwards=False), quick_s=3, full_s=12),
    Probe(name="host_to_device_copy_pageable", run=pageable, supported=cuda_only, quick_s=1.5, full_s=4),
    Probe(name="device_to_host_copy_duplex", run=duplex, supported=cuda_only, full_s=4),
)
