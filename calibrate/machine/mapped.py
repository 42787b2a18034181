"""Host memory read in place by the device: end to end, and random runs of it by run length, region and page size."""

from typing import Any

import torch

from calibrate.machine.timed import Region, host_region, timed
from calibrate.probes.probe import Context, Probe, Sample, cuda_only
from twin.units import GIB, KIB, MIB

RUNS = (512, 1 * KIB, 2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB)


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
    Probe(name="host_to_device_read", run=host_to_device_read, supported=cuda_only, full_s=4),
    Probe(name="host_to_device_gather", run=host_to_device_gather, quick_s=3.5, full_s=35),
)
