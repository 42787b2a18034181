"""Writing files so that nothing is lost: beside the old one, then renamed over it."""

import contextlib
import os
import tempfile
from pathlib import Path

from twin.errors import CannotWrite


def write_atomic(path: Path, text: str) -> None:
    """Put `text` into `path`; on any failure the old file stays as it was and CannotWrite says why."""
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as wrong:
        raise CannotWrite(f"cannot write {path}: {wrong.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        Path(beside).chmod(mode & 0o777)
        Path(beside).replace(path)
    except OSError as wrong:
        raise CannotWrite(f"cannot write {path}: {wrong.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            Path(beside).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
