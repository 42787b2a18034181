"""Reading a data file whole, within bounds: of bytes, and of the time that nothing comes."""

import os
import stat
import time
from pathlib import Path

from hwprofiles.errors import BadFile

MOST_BYTES = 8 * 2**20
"""Some twenty times the largest that is shipped; a second's work for a parser."""

LONGEST_WAIT_S = 5.0
"""Until the next byte of a pipe."""


def read_whole(path: Path) -> bytes:
    """All bytes of a file or of a pipe that somebody writes; BadFile in one line.

    A device has no end, a file that is too large is none of ours, and a pipe that nobody writes never says anything.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer would block here
        try:
            content = _read(handle, path)
        finally:
            os.close(handle)
    except OSError as wrong:
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None
    if len(content) > MOST_BYTES:
        raise BadFile(f"{path}: longer than {MOST_BYTES:,} bytes, the most that a data file may have")
    return content


def _read(handle: int, path: Path) -> bytes:
    """At most one byte over the limit."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):
        raise BadFile(f"{path}: cannot be read: Is a directory")
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise BadFile(f"{path}: cannot be read: a device, not a file")
    pieces: list[bytes] = []
    left = MOST_BYTES + 1
    while left and (piece := _piece(handle, left, path, piped=stat.S_ISFIFO(mode) and not pieces)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _piece(handle: int, most: int, path: Path, *, piped: bool) -> bytes:
    """What comes next; empty at the end. A pipe whose writer has yet to come is not at its end: `piped`."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            if (piece := os.read(handle, min(most, 2**20))) or not piped:
                return piece
        except BlockingIOError:  # somebody has it open and writes nothing for now
            pass
        if time.monotonic() >= deadline:
            raise BadFile(f"{path}: a pipe that nobody wrote to for {LONGEST_WAIT_S:g} s")
        time.sleep(0.01)
