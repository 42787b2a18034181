"""Rows of an n-gram table: a few random rows a token, from RAM or from disk.

The table is a plain file of `rows` rows of `row_bytes` bytes each, from `offset` on. From disk, the system reads whole
pages of 4 KiB, so that what a request costs is its distinct pages, not its bytes.
"""

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from realkernels.host_slab import PAGE_BYTES, close_mapping, mapped_bytes

Source = Literal["ram", "mmap", "pread"]
SOURCES: tuple[Source, ...] = ("ram", "mmap", "pread")


@dataclass(frozen=True, kw_only=True)
class NgramFile:
    """Where a table lies. ValueError for numbers that cannot be, or a file that is too short for them."""

    path: Path
    rows: int
    row_bytes: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.row_bytes < 1 or self.offset < 0:
            raise ValueError(f"no table: {self.rows} rows of {self.row_bytes} bytes from byte {self.offset}")
        needed, size = self.offset + self.rows * self.row_bytes, self.path.stat().st_size
        if size < needed:
            raise ValueError(f"{self.path} has {size} bytes, the table ends at {needed}")

    def check(self, wanted: torch.Tensor) -> None:
        """Requests are int64 [n], each in 0 ... rows - 1; IndexError or ValueError otherwise."""
        if wanted.dim() != 1 or wanted.dtype != torch.int64:
            raise ValueError(f"a request is int64 [n], not {wanted.dtype} {list(wanted.shape)}")
        if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= self.rows):
            raise IndexError(f"row {int(wanted.min())} or {int(wanted.max())} is out of range 0 to {self.rows - 1}")

    def pages(self, wanted: torch.Tensor) -> int:
        """Distinct pages of the file that a request touches: times PAGE_BYTES, what a cold read moves."""
        self.check(wanted)
        first = (self.offset + wanted * self.row_bytes) // PAGE_BYTES
        last = (self.offset + wanted * self.row_bytes + self.row_bytes - 1) // PAGE_BYTES
        touched = [
            torch.minimum(first + step, last) for step in range(int((last - first).max()) + 1 if len(wanted) else 0)
        ]
        return int(torch.cat(touched).unique().numel()) if touched else 0

    def forget(self) -> None:
        """Ask the system to drop the file's clean pages, so that the next read is cold. Only where the system can."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class NgramTable(Protocol):
    """An open table."""

    def read(self, wanted: torch.Tensor) -> torch.Tensor:
        """Rows of a request int64 [n] -> uint8 [n, row_bytes], in its order. IndexError for a row that is not there."""
        ...


class _Mapped:
    """Rows gathered from memory: loaded, or mapped and faulted in page by page."""

    def __init__(self, file: NgramFile, table: torch.Tensor) -> None:
        self._file, self._table = file, table

    def read(self, wanted: torch.Tensor) -> torch.Tensor:
        """See NgramTable."""
        self._file.check(wanted)
        return self._table.index_select(0, wanted)


class _Pread:
    """Rows read one by one, by several threads at once: a disk answers many requests faster than one after another."""

    def __init__(self, file: NgramFile, descriptor: int, pool: ThreadPoolExecutor, threads: int) -> None:
        self._file, self._descriptor, self._pool, self._threads = file, descriptor, pool, threads

    def read(self, wanted: torch.Tensor) -> torch.Tensor:
        """See NgramTable. OSError where the file ends early, although it was long enough when it was opened."""
        self._file.check(wanted)
        out = torch.empty(len(wanted), self._file.row_bytes, dtype=torch.uint8)
        if len(wanted) == 0:
            return out
        room = _bytes_of(out)
        order = wanted.argsort(stable=True).tolist()  # neighbours share pages
        rows = wanted.tolist()
        share = -(-len(rows) // self._threads)
        parts = [order[first : first + share] for first in range(0, len(order), share)]
        for done in [self._pool.submit(self._read_some, rows, part, room) for part in parts]:
            done.result()
        return out

    def _read_some(self, rows: list[int], part: list[int], room: memoryview) -> None:
        width = self._file.row_bytes
        for place in part:
            at = self._file.offset + rows[place] * width
            got = os.preadv(self._descriptor, [room[place * width : (place + 1) * width]], at)
            if got != width:
                raise OSError(f"{self._file.path}: {got} of {width} bytes at byte {at}")


@contextmanager
def open_table(file: NgramFile, source: Source, *, threads: int = 8) -> Iterator[NgramTable]:
    """The table read from `source`; `threads` only matters for pread. Everything is closed on leaving, on every path.

    ram: the whole table is loaded first. mmap: pages are faulted in by one thread. pread: by `threads` threads.
    """
    if source not in SOURCES:
        raise ValueError(f"no source {source!r}; there are {', '.join(SOURCES)}")
    size = file.rows * file.row_bytes
    with ExitStack() as stack:
        opened = stack.enter_context(file.path.open("rb", buffering=0))
        if source == "ram":
            table = torch.empty(file.rows, file.row_bytes, dtype=torch.uint8)
            _fill(opened.fileno(), _bytes_of(table), file)
            yield _Mapped(file, table)
            return
        if source == "pread":
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
            pool = stack.enter_context(ThreadPoolExecutor(max_workers=threads))
            yield _Pread(file, opened.fileno(), pool, threads)
            return
        mapping = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)  # writable in name only: torch asks for it
        stack.callback(close_mapping, mapping)
        if hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)
        flat = mapped_bytes(mapping, count=size, offset=file.offset)
        mapped = _Mapped(file, flat.view(file.rows, file.row_bytes))
        del flat
        try:
            yield mapped
        finally:
            del mapped._table  # the mapping closes only when no tensor looks at it


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().data).cast("B")


def _fill(descriptor: int, room: memoryview, file: NgramFile) -> None:
    done = 0
    while done < len(room):
        got = os.preadv(descriptor, [room[done : done + 2**30]], file.offset + done)
        if got == 0:
            raise OSError(f"{file.path} ended {len(room) - done} bytes early")
        done += got


def reference_rows(file: NgramFile, wanted: torch.Tensor) -> list[bytes]:
    """The same rows, one seek and one read each."""
    found = []
    with file.path.open("rb") as opened:
        for row in wanted.tolist():
            opened.seek(file.offset + row * file.row_bytes)
            found.append(opened.read(file.row_bytes))
    return found
