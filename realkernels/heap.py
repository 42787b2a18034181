"""The C library's heap: whether memory that was freed stays with the process."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt in glibc."""

MOST_BYTES = 2**31 - 1
LARGEST_KEPT_BYTES = 2**25
"""The most that glibc accepts."""


def keep_freed_memory() -> bool:
    """Let blocks of up to 32 MiB be used again without asking the kernel; whether the C library does so.

    By default glibc decides from what was freed before. A temporary tensor then costs nothing in one process and as
    many page faults as it has pages in another, which is up to 40 % of a kernel's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return bool(mallopt(TRIM_THRESHOLD, MOST_BYTES)) and bool(mallopt(MMAP_THRESHOLD, LARGEST_KEPT_BYTES))
