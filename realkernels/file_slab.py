"""Memory backed by a nameless file: the offload tier of a computer without a GPU."""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from realkernels.host_slab import PAGE_BYTES, HostSlab, close_mapping, mapped_bytes


@contextmanager
def file_slab(nbytes: int, *, folder: str | None = None) -> Iterator[HostSlab]:
    """`nbytes` (rounded up to a page) of zeros, mapped from a file in `folder` (None: the system's temporary folder).

    The file has no name from the start, so that no path out of the block, not even a kill, leaves it behind. Its space
    is reserved at once: a full disk is a RuntimeError here, not a bus error at some later write.
    """
    if nbytes < 1:
        raise ValueError(f"a slab of {nbytes} bytes is none")
    size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            where = folder or tempfile.gettempdir()
            room = os.fstatvfs(file.fileno())
            raise RuntimeError(
                f"the offload tier needs {size / 2**30:.2f} GiB of disk, {where} has "
                f"{room.f_bavail * room.f_frsize / 2**30:.2f} GiB free: give another folder or a shorter context"
            ) from None
        mapping = mmap.mmap(file.fileno(), size)
        try:
            yield _slab(mapping, size)
        finally:
            close_mapping(mapping)


def _slab(mapping: mmap.mmap, size: int) -> HostSlab:
    host = mapped_bytes(mapping)
    return HostSlab(nbytes=size, host=host, device=host)
