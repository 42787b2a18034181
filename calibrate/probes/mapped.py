"""Host memory read in place: end to end, and random runs of it by run length, region and page size."""

from typing import Any

import torch

from calibrate.probes.memory import MIB
from calibrate.probes.probe import Context, Probe, Sample, check, cuda_only
from calibrate.probes.tiers import host_region

KIB, GIB = 2**10, 2**30
RUNS = (512, 1 * KIB, 2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB)


def host_to_device_read(context: Context) -> list[Sample]:
    """A kernel that reads registered host memory from end to end."""
    from calibrate.probes.device_kernels import Sum  # noqa: PLC0415

    size = context.pick(256 * MIB, 1024 * MIB)
    with host_region(context, size) as region:
        data = region.device.view(torch.int32)
        total = Sum(data)
        seconds = context.seconds(total.run)
        wanted = int(region.host.view(torch.int32).sum(dtype=torch.int64))
        how = check("host_to_device_read", (total.value() - wanted) % 2**32 == 0, "the sum modulo 2^32")
        del data, total, region
    return [Sample(at={"bytes": size}, seconds=seconds, moved_bytes=size, checked=how)]


def host_to_device_gather(context: Context) -> list[Sample]:
    """Random runs of host memory, fresh ones every time."""
    samples = []
    regions = _regions(context)
    for pages in ("huge", "4KiB") if context.cuda else ("file",):
        with host_region(context, regions[-1], huge_pages=pages == "huge") as region:
            points = [(size, run) for size in regions for run in context.pick((512, 4 * KIB, 64 * KIB), RUNS)]
            for size, run in context.points(sorted(points)):
                seconds, moved, how = _gather(context, region.device[:size], run)
                at: dict[str, int | float | str] = {"run_bytes": run, "region_bytes": size, "pages": pages}
                samples.append(Sample(at=at, seconds=seconds, moved_bytes=moved, checked=how))
            del region
    return samples


def _regions(context: Context) -> list[int]:
    if not context.cuda:
        return context.pick([256 * MIB], [64 * MIB, 1024 * MIB])
    wanted = context.pick([64 * MIB, 2 * GIB], [64 * MIB, 1 * GIB, 4 * GIB, 16 * GIB])
    return context.fitting(wanted, free_bytes=context.machine.host_free_bytes, share=0.3) or [64 * MIB]


def _gather(context: Context, data: Any, run: int) -> tuple[tuple[float, ...], int, str]:
    """Reads 48 MiB (on the CPU 16 MiB) of runs -> seconds, bytes, how it was checked."""
    runs = (48 * MIB if context.cuda else 16 * MIB) // run
    slots = data.numel() // run
    name = f"host_to_device_gather of {run} B"
    if context.cuda:
        from calibrate.probes.device_kernels import RunSums  # noqa: PLC0415

        sums = RunSums(data.view(torch.int32), run_bytes=run, runs=runs)
        seconds = context.seconds(sums.run, before=lambda: sums.starts.random_(0, slots))
        some = sums.starts[:256].cpu()
        table = data.view(torch.int32).view(-1, run // 4)
        wanted = table[some.to(data.device)].long().sum(dim=1)
        right = ((sums.partial[:256].long() - wanted) % 2**32 == 0).all()
        return seconds, runs * run, check(name, right, "sums of 256 runs")
    table = data.view(torch.int64).view(-1, run // 8)
    starts = torch.zeros(runs, dtype=torch.int64)
    target = torch.empty(runs, run // 8, dtype=torch.int64)
    seconds = context.seconds(
        lambda: torch.index_select(table, 0, starts, out=target), before=lambda: starts.random_(0, slots)
    )
    return seconds, runs * run, check(name, torch.equal(target, table[starts]), "equal")


PROBES = (
    Probe(name="host_to_device_read", run=host_to_device_read, supported=cuda_only, full_s=4),
    Probe(name="host_to_device_gather", run=host_to_device_gather, quick_s=3.5, full_s=35),
)
