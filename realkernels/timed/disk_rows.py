"""Random rows of a table, a few for each token (an n-gram table, say), from RAM or from disk, as a timed call.

The table is a plain file of `rows` rows of `row_bytes` bytes each, from `offset` on. From disk, the system reads whole
pages of 4 KiB, so that what a request costs is its distinct pages, not its bytes.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from realkernels.caches.host_memory import PAGE_BYTES, close_mapping, mapped_bytes
from realkernels.timed.call import TimedCall

Source = Literal["ram", "mmap", "pread"]
SOURCES: tuple[Source, ...] = ("ram", "mmap", "pread")


@dataclass(frozen=True, kw_only=True)
class RowFile:
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
        if not wanted.numel():
            return 0
        first = (self.offset + wanted * self.row_bytes) // PAGE_BYTES
        last = (self.offset + wanted * self.row_bytes + self.row_bytes - 1) // PAGE_BYTES
        touched = [torch.minimum(first + step, last) for step in range(int((last - first).max()) + 1)]
        return int(torch.cat(touched).unique().numel())

    def reference_rows(self, wanted: torch.Tensor) -> list[bytes]:
        """Rows of a request, one seek and one read each."""
        found = []
        with self.path.open("rb") as opened:
            for row in wanted.tolist():
                opened.seek(self.offset + row * self.row_bytes)
                found.append(opened.read(self.row_bytes))
        return found


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """An open table."""

    file: RowFile
    source: Source
    _rows: Callable[[torch.Tensor], torch.Tensor]
    _unmap: Callable[[], object] = bool
    """Lets go of a mapping's pages, which the system would not drop while they are mapped."""

    def read(self, wanted: torch.Tensor) -> torch.Tensor:
        """Rows of a request int64 [n] -> uint8 [n, row_bytes], in its order.

        IndexError for a row that is not there; OSError where the file ends early, although it was long enough once.
        """
        self.file.check(wanted)
        return self._rows(wanted)

    def forget(self) -> None:
        """Ask the system to drop the file's clean pages, so that the next read is cold. Only where the system can."""
        self._unmap()
        descriptor = os.open(self.file.path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def open_table(file: RowFile, source: Source, *, threads: int = 8) -> Iterator[RowTable]:
    """The table read from `source`; `threads` only matters for pread. Everything is closed on leaving, on every path.

    ram: the whole table is loaded first. mmap: pages are faulted in by one thread. pread: by `threads` threads.
    """
    if source not in SOURCES:
        raise ValueError(f"no source {source!r}; there are {', '.join(SOURCES)}")
    with ExitStack() as stack:
        opened = stack.enter_context(file.path.open("rb", buffering=0))
        if source == "ram":
            table = torch.empty(file.rows, file.row_bytes, dtype=torch.uint8)
            _fill(opened.fileno(), _bytes_of(table), file)
            yield RowTable(file=file, source=source, _rows=lambda wanted: table.index_select(0, wanted))
        elif source == "pread":
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
            pool = stack.enter_context(ThreadPoolExecutor(max_workers=threads))
            yield RowTable(file=file, source=source, _rows=_Pread(file, opened.fileno(), pool, threads).read)
        else:
            mapping = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)  # writable in name only: torch asks for it
            stack.callback(close_mapping, mapping)
            if hasattr(mmap, "MADV_RANDOM"):
                mapping.madvise(mmap.MADV_RANDOM)
            yield RowTable(
                file=file, source=source, _rows=lambda wanted: _mapped(file, mapping).index_select(0, wanted),
                _unmap=lambda: mapping.madvise(mmap.MADV_DONTNEED) if hasattr(mmap, "MADV_DONTNEED") else None,
            )  # fmt: skip


def _mapped(file: RowFile, mapping: mmap.mmap) -> torch.Tensor:
    """A view of each read's own: the mapping closes only when no tensor looks at it."""
    flat = mapped_bytes(mapping, count=file.rows * file.row_bytes, offset=file.offset)
    return flat.view(file.rows, file.row_bytes)


class _Pread:
    """Rows read one by one, by several threads at once: a disk answers many requests faster than one after another."""

    def __init__(self, file: RowFile, descriptor: int, pool: ThreadPoolExecutor, threads: int) -> None:
        self._file, self._descriptor, self._pool, self._threads = file, descriptor, pool, threads

    def read(self, wanted: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(wanted), self._file.row_bytes, dtype=torch.uint8)
        if not len(wanted):
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


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().data).cast("B")


def _fill(descriptor: int, room: memoryview, file: RowFile) -> None:
    done = 0
    while done < len(room):
        got = os.preadv(descriptor, [room[done : done + 2**30]], file.offset + done)
        if got == 0:
            raise OSError(f"{file.path} ended {len(room) - done} bytes early")
        done += got


class ReadRows(TimedCall):
    """`reads` random rows of an open table; from a file they are cold after `poison`, unless `warm`."""

    capturable = False

    def __init__(self, table: RowTable, *, reads: int, warm: bool = False) -> None:
        self.table, self.cold = table, table.source != "ram" and not warm
        self.wanted = torch.empty(reads, dtype=torch.int64)
        self.poison()

    def run(self) -> None:
        """One request."""
        self.output = self.table.read(self.wanted)

    def poison(self) -> None:
        """Another request; its bytes are whole pages where it is cold."""
        file = self.table.file
        self.output = torch.empty(0)
        self.wanted.random_(0, file.rows)
        self.moved_bytes = self.wanted.numel() * file.row_bytes
        if self.cold:
            self.table.forget()
            self.moved_bytes = file.pages(self.wanted) * PAGE_BYTES

    def finite(self) -> bool:
        """Whether the request has been answered."""
        return self.output.shape == (self.wanted.numel(), self.table.file.row_bytes)

    def error(self) -> float:
        """0 where every row is the file's own bytes, infinite otherwise."""
        found = [bytes(row.tolist()) for row in self.output]
        return 0.0 if found == self.table.file.reference_rows(self.wanted) else float("inf")
