"""What the probes of a machine share: one timed and verified call, and host memory to work on."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from calibrate.probes import Context, Sample, check

FILL_BYTES = 2**26


def timed(
    context: Context, name: str, work: Callable[[], object], *, at: Mapping[str, int | float | str],
    right: Callable[[], object], how: str, moved_bytes: float = 0, flops: float = 0, per: int = 1,
    seconds: Callable[[Callable[[], object]], tuple[float, ...]] | None = None,
    before: Callable[[], object] | None = None,
) -> Sample:  # fmt: skip
    """Time `work` (by `seconds`; None: the device's clock), then ask whether its result is `right`.

    `per`, `before`: see `Context.seconds`; `how` says what was compared. Raises WrongData.
    """
    took = seconds(work) if seconds is not None else context.seconds(work, before=before, per=per)
    return Sample(at=at, seconds=took, moved_bytes=moved_bytes, flops=flops, checked=check(name, right(), how))


class Region(NamedTuple):
    """The same bytes as seen from the host and from the device: uint8 tensors [nbytes]."""

    host: Any
    device: Any


@contextmanager
def host_region(context: Context, nbytes: int, *, huge_pages: bool = True) -> Iterator[Region]:
    """`nbytes` of host memory, filled with a random pattern that repeats every 64 MiB; released on every path.

    A registered slab that a GPU reads in place, or a mapped file where the device is the CPU.
    """
    if context.cuda:
        from realkernels.caches.host_memory import registered  # noqa: PLC0415

        with registered(nbytes, device=context.backend.device, huge_pages=huge_pages) as slab:
            region = Region(slab.host[:nbytes], slab.device[:nbytes])
            fill(region.device)
            torch.cuda.synchronize(context.backend.device)
            yield region
            del region, slab
        return
    with scratch_file(context.folder, nbytes) as handle:
        mapping = mmap.mmap(handle, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)  # the last reference to the map unmaps it
        fill(tensor)
        yield Region(tensor, tensor)
        del tensor


def fill(target: Any) -> None:
    """Random bytes that repeat every 64 MiB, in uint8 `target`."""
    pattern = torch.randint(0, 256, (min(FILL_BYTES, target.numel()),), dtype=torch.uint8, device=target.device)
    for part in target.split(FILL_BYTES):
        part.copy_(pattern[: part.numel()])


@contextmanager
def scratch_file(folder: Path, nbytes: int) -> Iterator[int]:
    """Descriptor of a nameless file of `nbytes` allocated bytes in `folder`. Raises OSError where the disk is full."""
    with tempfile.TemporaryFile(dir=folder) as file:  # no path out, not even a kill, leaves it behind
        os.posix_fallocate(file.fileno(), 0, nbytes)  # a hole would turn a full disk into a bus error later
        yield file.fileno()
