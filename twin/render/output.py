"""Writing files so that nothing is lost: beside the old one, then renamed over it. What is no file is written to."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from twin.errors import CannotWrite


def write_atomic(path: Path, text: str) -> None:
    """Put `text` into `path`; on any failure the old file stays as it was and CannotWrite says why.

    A link stays a link: its target is replaced. A pipe or a device is written to as it is.
    """
    try:
        there = _status(path)
        if there is None or (stat.S_ISREG(there.st_mode) and _stream_on(there) is None):
            mode = 0o666 & ~_umask() if there is None else there.st_mode
            _replace(Path(os.path.realpath(path)), text, mode & 0o777)
        else:
            _write_into(path, there, text)
    except OSError as wrong:
        raise CannotWrite(f"cannot write {path}: {wrong.strerror}") from None


def _replace(path: Path, text: str, mode: int) -> None:
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        Path(beside).chmod(mode)
        Path(beside).replace(path)
    finally:
        with contextlib.suppress(OSError):
            Path(beside).unlink(missing_ok=True)


def _write_into(path: Path, there: os.stat_result, text: str) -> None:
    """Into a pipe or device; a pipe that nobody reads is refused rather than waited for."""
    stream = _stream_on(there)
    if stream is None:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(handle, True)
    else:
        handle = os.dup(stream)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(text)


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
