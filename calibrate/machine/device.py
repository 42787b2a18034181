"""The device alone: its memory read and copied, what starting a kernel costs, and its operations a second."""

from functools import partial

import torch

from calibrate.machine.timed import fill, timed
from calibrate.probes import Context, Probe, Sample, cuda_only
from twin.units import MIB

NODES = 200
"""Kernels started one after the other, eagerly and as nodes of a replayed graph."""


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


def additions(context: Context, *, name: str, graph: bool) -> list[Sample]:
    """A kernel that does next to nothing, many times: launched back to back, or as dependent nodes of a graph."""
    numbers = torch.zeros(32, dtype=torch.float32, device=context.backend.device)

    def many() -> None:
        for _ in range(NODES):
            numbers.add_(1.0)

    work = context.backend.capture(many) if graph else many

    def right() -> bool:
        before = float(numbers[0])
        work()
        return float(numbers[-1]) == before + NODES

    return [timed(context, name, work, per=NODES, at={"nodes": NODES}, right=right, how="all additions done")]


def instructions(context: Context) -> list[Sample]:
    """Chains of integer and logic operations (lop3, shf) in registers, many a thread, so that none is waited for.

    It is what dequantising codes is made of.
    """
    from calibrate.machine.kernels import CHAINS, Chains  # noqa: PLC0415 - needs triton

    samples = []
    for count in context.points(context.pick(CHAINS[-1:], CHAINS)):
        chains = Chains(chains=count, device=context.backend.device)
        samples.append(timed(
            context, "instructions", context.backend.capture(chains.run), flops=chains.operations,
            at={"chains": count, "programs": chains.programs, "steps": chains.steps},
            right=chains.right, how="every chain as computed on the host",
        ))  # fmt: skip
    return samples


PROBES = (
    Probe(name="vram_read", run=vram_read, quick_s=2, full_s=4),
    Probe(name="vram_copy", run=vram_copy, quick_s=1, full_s=5),
    *(
        Probe(name=name, run=partial(additions, name=name, graph=graph), supported=cuda_only, quick_s=1, full_s=3)
        for name, graph in (("launch", False), ("graph_node", True))
    ),
    Probe(name="instructions", run=instructions, supported=cuda_only, quick_s=1.5, full_s=3),
)
