"""Host memory for probes: a registered slab that a GPU reads in place, or a mapped file where the device is the CPU."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from calibrate.probes.probe import Context

FILL_BYTES = 2**26


class Region(NamedTuple):
    """The same bytes as seen from the host and from the device: uint8 tensors [nbytes]."""

    host: Any
    device: Any


@contextmanager
def host_region(context: Context, nbytes: int, *, huge_pages: bool = True) -> Iterator[Region]:
    """`nbytes` of the host tier, filled with a random pattern that repeats every 64 MiB; released on every path."""
    if context.cuda:
        from realkernels.caches.host_memory import registered  # noqa: PLC0415

        with registered(nbytes, device=context.backend.device, huge_pages=huge_pages) as slab:
            region = Region(slab.host[:nbytes], slab.device[:nbytes])
            fill(region.device)
            torch.cuda.synchronize(context.backend.device)
            yield region
            del region, slab
        return
    with mapped_file(context.folder, nbytes) as mapping:
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
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


@contextmanager
def mapped_file(folder: Path, nbytes: int) -> Iterator[mmap.mmap]:
    """A shared map of a nameless file; the last reference to it unmaps it."""
    with scratch_file(folder, nbytes) as handle:
        yield mmap.mmap(handle, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
