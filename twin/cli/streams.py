"""Streams that take every byte: a full disk, a pipe that is full for now and a closed stream are all noticed."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from twin.errors import CannotWrite

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LostOutput(CannotWrite):
    """Standard output took less than what was written to it."""


class Whole(io.FileIO):
    """A raw stream that takes all that it is given; the buffer above repeats what was taken in part.

    Where a pipe that does not block is full, it waits. What the system refuses becomes `refusal`, which names `what`
    was being written; BrokenPipeError stays. Then it takes no more: the buffer would try again as it is closed.
    """

    lost = False

    def __init__(
        self, handle: int, what: object, *, refusal: type[CannotWrite] = CannotWrite, shut: bool = True
    ) -> None:
        super().__init__(handle, "wb", closefd=shut)
        self.what = what
        self.refusal = refusal

    def write(self, data: "ReadableBuffer", /) -> int:
        """Bytes taken, at least one."""
        if self.lost:
            return memoryview(data).nbytes
        try:
            while (taken := super().write(data)) is None:
                import select  # noqa: PLC0415

                select.select([], [self], [])
        except OSError as wrong:
            self.lost = True
            if isinstance(wrong, BrokenPipeError):
                raise
            raise self.refusal(f"cannot write {self.what}: {wrong.strerror}") from None
        return taken


class _Remarks(Whole):
    """Standard error. Where a remark cannot be written the exit code alone has to say it."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def text_into(raw: io.RawIOBase, *, encoding: str = "utf-8", line_buffering: bool = False) -> TextIO:
    """Text into a raw stream; what its encoding does not know is spelled out (\\udcff), for names are any bytes."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=line_buffering
    )


@contextmanager
def standard_streams() -> Iterator[None]:
    """Put such streams in the place of Python's own standard output and error, for as long as a command runs."""
    _plug()
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _standing_for(sys.stdout, Whole(1, "standard output", refusal=LostOutput, shut=False))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _standing_for(sys.stderr, _Remarks(2, "standard error", shut=False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _standing_for(stream: TextIO | None, raw: io.RawIOBase) -> TextIO:
    if stream is None:  # closed before the process began
        return text_into(raw)
    at_once = raw.fileno() == 2 or stream.isatty()
    return text_into(raw, encoding=stream.encoding, line_buffering=at_once)


def _plug() -> None:
    """Take the numbers of streams that were closed: the next file would get them, and what is said be written there.

    Reading from number 0 and writing to 1 and 2 fails as it does on a closed stream.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            if number == 0:
                os.open(os.devnull, os.O_WRONLY)
            else:
                os.close(os.pipe()[1])
