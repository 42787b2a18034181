"""Writing files so that nothing is lost: beside the old one, then renamed over it. What is no file is written to."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from twin.errors import BadValue, CannotWrite, TwinError


def write_atomic(path: Path, text: str) -> None:
    """Put `text` into `path`; on any failure the old file stays as it was and CannotWrite says why.

    A link stays a link: its target is replaced. A pipe or a device is written to as it is.
    """
    with open_atomic(path) as out:
        out.write(text)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[TextIO]:
    """A file to write piece by piece, which takes the place of `path` once the block has ended well.

    On any failure the old file stays as it was; where it was writing that failed, CannotWrite says why, and
    BrokenPipeError where the reader of a pipe has gone.
    """
    try:
        there = _status(path)
        if there is None or _is_file(there):
            mode = 0o666 & ~_umask() if there is None else there.st_mode
            opened = _replacing(Path(os.path.realpath(path)), mode & 0o777)
        else:
            opened = _writing_into(path, there)
        with opened as out:
            yield out
    except OSError as wrong:
        if isinstance(wrong, TwinError | BrokenPipeError):
            raise
        raise CannotWrite(f"cannot write {path}: {wrong.strerror}") from None


def check_apart(files: dict[str, Path | None]) -> None:
    """Raise BadValue where two options name one file: what is written last would be all that is left of it."""
    flags: dict[str, str] = {}
    for flag, path in files.items():
        if path is None or not _takes_all(path):
            continue
        target = os.path.realpath(path)
        if target in flags:
            raise BadValue(f"{flags[target]} and {flag} name one file: {path}")
        flags[target] = flag


def _takes_all(path: Path) -> bool:
    """Whether it is, or will be, a file that is replaced as a whole."""
    with contextlib.suppress(OSError):
        there = _status(path)
        return there is None or _is_file(there)
    return False


def _is_file(there: os.stat_result) -> bool:
    return stat.S_ISREG(there.st_mode) and _stream_on(there) is None


@contextlib.contextmanager
def _replacing(path: Path, mode: int) -> Iterator[TextIO]:
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        Path(beside).chmod(mode)
        Path(beside).replace(path)
    finally:
        with contextlib.suppress(OSError):
            Path(beside).unlink(missing_ok=True)


@contextlib.contextmanager
def _writing_into(path: Path, there: os.stat_result) -> Iterator[TextIO]:
    """Into a pipe or device; a pipe that nobody reads is refused rather than waited for."""
    stream = _stream_on(there)
    if stream is None:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(handle, True)
    else:
        handle = os.dup(stream)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        yield out


def _stream_on(there: os.stat_result) -> int | None:
    """The standard stream that goes there already: `/dev/stdout` may be a file that others write to as well."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(there, os.fstat(stream)):
                return stream
    return None


def _status(path: Path) -> os.stat_result | None:
    """What `path` or the target of its link is; None where nothing is yet."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
