"""The link between host and device memory, by copies: alone, in a queue, pageable, both ways at once."""

import math
import time
from functools import partial
from typing import Any

import torch

from calibrate.probes.machine import query_smi
from calibrate.probes.memory import MIB
from calibrate.probes.probe import Context, Probe, Sample, check, cuda_only
from calibrate.probes.tiers import Region, fill, host_region

KIB = 2**10
SINGLE = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
QUEUED = tuple((copies, size) for size in (MIB, 4 * MIB, 16 * MIB) for copies in (4, 16, 64))
BEYOND_CACHES = 64 * MIB
"""What a CPU has to move for its caches not to pass for a link: less is not timed there, nor more than once around."""

LOADED_S = 1.5
"""Least time that the link is kept busy while its state is asked for: nvidia-smi takes some tenths of a second."""


def _buffer_bytes(context: Context) -> int:
    sizes = (64 * MIB, 256 * MIB) if context.quick else (64 * MIB, 256 * MIB, 1024 * MIB)
    return (context.fitting(sizes, free_bytes=context.machine.host_free_bytes, share=0.25) or [64 * MIB])[-1]


def _copies(context: Context, source: Any, target: Any, *, name: str) -> list[Sample]:
    """Copies source -> target, one by one over sizes, then queues of equal copies."""
    samples = []
    least, most = (0, math.inf) if context.cuda else (BEYOND_CACHES, target.numel())
    for size in context.points([size for size in SINGLE if least <= size <= target.numel()]):
        target[:size].zero_()
        seconds = context.seconds(partial(target[:size].copy_, source[:size], non_blocking=True))
        _same(name, source, target, size)
        samples.append(Sample(at={"copies": 1, "copy_bytes": size}, seconds=seconds, moved_bytes=size, checked="equal"))
    queues = [(copies, size) for copies, size in QUEUED if size <= target.numel() // 4]
    for copies, size in context.points([queue for queue in queues if least <= queue[0] * queue[1] <= most]):
        slots = target.numel() // size
        target[: min(copies, slots) * size].zero_()

        def queue(copies: int = copies, size: int = size, slots: int = slots) -> None:
            for index in range(copies):
                first = index % slots * size
                target[first : first + size].copy_(source[first : first + size], non_blocking=True)

        seconds = context.seconds(queue)
        _same(name, source, target, min(copies, slots) * size)
        at = {"copies": copies, "copy_bytes": size}
        samples.append(Sample(at=at, seconds=seconds, moved_bytes=copies * size, checked="equal"))
    return samples


def _same(name: str, source: Any, target: Any, size: int) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    check(name, torch.equal(source[:size].cpu(), target[:size].cpu()), f"{size} bytes copied and compared")


def host_to_device_copy(context: Context) -> list[Sample]:
    """Registered host memory (on the CPU: a mapped file) into device memory."""
    size = _buffer_bytes(context)
    with host_region(context, size) as region:
        target = torch.empty(size, dtype=torch.uint8, device=context.backend.device)
        samples = _copies(context, region.host, target, name="host_to_device_copy")
        if context.cuda:
            samples.append(_link_state(context, region, target, rate=samples[-1].moved_bytes / samples[-1].median_s))
        del region
    return samples


def _link_state(context: Context, region: Region, target: Any, *, rate: float) -> Sample:
    """Generation and width of the link while copies run: idle links are trained down to save power."""
    begin = time.monotonic()
    for _ in range(int(LOADED_S * rate / target.numel()) + 1):
        target.copy_(region.host, non_blocking=True)
    smi = query_smi(context.machine.smi_name)
    torch.cuda.synchronize(target.device)
    at: dict[str, int | float | str] = {"state": "loaded"}
    at |= {key: value for key, value in smi.items() if key.startswith(("pcie", "clocks", "temperature"))}
    return Sample(at=at, seconds=(time.monotonic() - begin,))


def device_to_host_copy(context: Context) -> list[Sample]:
    """Device memory into registered host memory (on the CPU: into a mapped file)."""
    size = _buffer_bytes(context)
    with host_region(context, size) as region:
        source = torch.empty(size, dtype=torch.uint8, device=context.backend.device)
        fill(source)
        samples = _copies(context, source, region.host, name="device_to_host_copy")
        del region
    return samples


def host_to_device_copy_pageable(context: Context) -> list[Sample]:
    """Ordinary host memory, which the driver copies through a pinned buffer of its own."""
    samples = []
    size = context.pick(64 * MIB, 256 * MIB)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8, device=context.backend.device)
    for part in context.points([MIB, 16 * MIB, size]):
        seconds = context.seconds(partial(target[:part].copy_, source[:part]))
        _same("host_to_device_copy_pageable", source, target, part)
        at = {"copies": 1, "copy_bytes": part}
        samples.append(Sample(at=at, seconds=seconds, moved_bytes=part, checked="equal"))
    return samples


def device_to_host_copy_duplex(context: Context) -> list[Sample]:
    """Both directions at once, on two streams; bytes are those of both."""
    size = _buffer_bytes(context) // 2
    device = context.backend.device
    with host_region(context, 2 * size) as region:
        out, back = region.host[:size], region.host[size:]
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

        seconds = context.seconds(both)
        _same("device_to_host_copy_duplex", out, target, size)
        _same("device_to_host_copy_duplex", source, back, size)
        del region
    return [Sample(at={"copy_bytes": size}, seconds=seconds, moved_bytes=2 * size, checked="equal")]


PROBES = (
    Probe(name="host_to_device_copy", run=host_to_device_copy, quick_s=4, full_s=12),
    Probe(name="device_to_host_copy", run=device_to_host_copy, quick_s=3, full_s=12),
    Probe(
        name="host_to_device_copy_pageable",
        run=host_to_device_copy_pageable,
        supported=cuda_only,
        quick_s=1.5,
        full_s=4,
    ),
    Probe(name="device_to_host_copy_duplex", run=device_to_host_copy_duplex, supported=cuda_only, full_s=4),
)
