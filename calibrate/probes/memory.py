"""Device memory: reading it and copying within it."""

from functools import partial

import torch

from calibrate.probes.probe import Context, Probe, Sample, check
from calibrate.probes.tiers import fill

MIB = 2**20


def sizes(context: Context) -> list[int]:
    """Buffers well beyond any cache, two of which fit the free memory."""
    wanted = context.pick([1024 * MIB], [1024 * MIB, 4096 * MIB] if context.cuda else [1024 * MIB, 2048 * MIB])
    return context.fitting(wanted, free_bytes=context.machine.device_free_bytes, share=0.3) or [128 * MIB]


def vram_read(context: Context) -> list[Sample]:
    """Sum of a large buffer: every byte is read once, next to nothing is written."""
    samples = []
    for size in context.points(sizes(context)):
        if context.cuda:
            from calibrate.probes.device_kernels import Sum  # noqa: PLC0415

            data = torch.randint(0, 16, (size // 4,), dtype=torch.int32, device=context.backend.device)
            total = Sum(data)
            seconds = context.seconds(total.run)
            right = total.value() == sum(int(part.sum()) for part in data.split(2**28))
        else:
            numbers = torch.ones(size // 4, dtype=torch.float32)
            result = torch.empty(())
            seconds = context.seconds(partial(torch.sum, numbers, dim=0, out=result))
            right = abs(float(result) / numbers.numel() - 1) < 1e-3
        how = check("vram_read", right, "the sum")
        samples.append(Sample(at={"bytes": size}, seconds=seconds, moved_bytes=size, checked=how))
    return samples


def vram_copy(context: Context) -> list[Sample]:
    """Copy of a large buffer: bytes read plus bytes written."""
    samples = []
    for size in context.points(sizes(context)[:1]):
        source = torch.empty(size, dtype=torch.uint8, device=context.backend.device)
        fill(source)
        target = torch.zeros_like(source)
        seconds = context.seconds(partial(target.copy_, source))
        how = check("vram_copy", torch.equal(source, target), "all bytes equal")
        samples.append(Sample(at={"bytes": size}, seconds=seconds, moved_bytes=2 * size, checked=how))
    return samples


PROBES = (
    Probe(name="vram_read", run=vram_read, quick_s=2, full_s=4),
    Probe(name="vram_copy", run=vram_copy, quick_s=1, full_s=5),
)
