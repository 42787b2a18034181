"""Host memory of the offload tier: registered so that a GPU reads it in place; on the CPU, a mapped nameless file."""

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch

PORTABLE_MAPPED = 1 | 2
"""cudaHostRegisterPortable | cudaHostRegisterMapped (driver_types.h)."""

MADV_HUGEPAGE = 14
PAGE_BYTES = 4096


class RegistrationError(RuntimeError):
    """The driver would not register the memory; nothing is left pinned."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The same bytes as the host and as the device address them, tensors of uint8 [nbytes]."""

    nbytes: int
    host: torch.Tensor
    device: torch.Tensor


def host_memory(
    nbytes: int, *, device: torch.device, huge_pages: bool = True, folder: str | None = None
) -> AbstractContextManager[HostMemory]:
    """`nbytes` of zeros in the offload tier of `device`: `registered`, or `mapped_file` where the CPU is the device."""
    if device.type == "cuda":
        return registered(nbytes, device=device, huge_pages=huge_pages)
    return mapped_file(nbytes, folder=folder)


@contextmanager
def registered(nbytes: int, *, device: torch.device, huge_pages: bool = True) -> Iterator[HostMemory]:
    """`nbytes` (rounded up to a page) of zeros that kernels on `device` read and write in place.

    Huge pages are asked for before the first touch: afterwards the system would have to migrate. Whatever happens in
    the block, the registration and the mapping are gone after it; use no alias beyond it.
    Raises RegistrationError where the driver refuses (locked-memory limit, too little memory), leaving nothing pinned.
    """
    size = _whole_pages(nbytes)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        if huge_pages and hasattr(mapping, "madvise"):
            mapping.madvise(MADV_HUGEPAGE)
        anchor = ctypes.c_char.from_buffer(mapping)
        try:
            yield from _registered(mapping, ctypes.addressof(anchor), size, device)
        finally:
            del anchor
    finally:
        close_mapping(mapping)


def _registered(mapping: mmap.mmap, address: int, size: int, device: torch.device) -> Iterator[HostMemory]:
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the context must exist before memory is mapped into it
        status = runtime.cudaHostRegister(address, size, PORTABLE_MAPPED)
    if int(status) != 0:
        _forget_last_error(device)
        raise RegistrationError(
            f"registering {size / 2**30:.2f} GiB of host memory failed: CUDA error {int(status)}; "
            "check the locked-memory limit (ulimit -l) and free host memory"
        )
    try:
        # No local names: what this frame holds, a traceback would keep mapped.
        yield HostMemory(nbytes=size, host=mapped_bytes(mapping), device=_device_view(address, size, device))
    finally:
        try:
            torch.cuda.synchronize(device)
        finally:  # also where a kernel has failed and every call reports it
            runtime.cudaHostUnregister(address)


def _device_view(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    class Pointer:
        """What torch asks of a foreign device array (CUDA Array Interface, version 3)."""

        __cuda_array_interface__ = {  # noqa: RUF012 - read once
            "data": (address, False), "shape": (nbytes,), "strides": None, "typestr": "|u1", "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Pointer(), device=device)


def _forget_last_error(device: torch.device) -> None:
    """The runtime remembers a refused call as its last error, which the next launch would report as its own."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


@contextmanager
def mapped_file(nbytes: int, *, folder: str | None = None) -> Iterator[HostMemory]:
    """`nbytes` (rounded up to a page) of zeros, mapped from a file in `folder` (None: the system's temporary folder).

    The file has no name from the start, so that no path out of the block, not even a kill, leaves it behind. Its space
    is reserved at once: a full disk is a RuntimeError here, not a bus error at some later write.
    """
    size = _whole_pages(nbytes)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            room = os.fstatvfs(file.fileno())
            raise RuntimeError(
                f"the offload tier needs {size / 2**30:.2f} GiB of disk, {folder or tempfile.gettempdir()} has "
                f"{room.f_bavail * room.f_frsize / 2**30:.2f} GiB free: give another folder or a shorter context"
            ) from None
        mapping = mmap.mmap(file.fileno(), size)
        try:
            yield _file_memory(mapping, size)
        finally:
            close_mapping(mapping)


def _file_memory(mapping: mmap.mmap, size: int) -> HostMemory:
    host = mapped_bytes(mapping)
    return HostMemory(nbytes=size, host=host, device=host)


def _whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages; ValueError for none."""
    if nbytes < 1:
        raise ValueError(f"{nbytes} bytes of host memory are none")
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def mapped_bytes(mapping: mmap.mmap, *, count: int = -1, offset: int = 0) -> torch.Tensor:
    """A mapping's bytes as a tensor of uint8 (`count` of them; -1: all) that keeps it mapped for as long as it lives.

    By way of numpy, whose arrays hold the buffer: torch.frombuffer lets go of it, so that closing the mapping would
    pull the memory away from under the tensor.
    """
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8, count=count, offset=offset))


def close_mapping(mapping: mmap.mmap) -> None:
    """Unmap now, or with the last tensor that still looks at it."""
    with suppress(BufferError):  # some tensor of `mapped_bytes` is left, held by a traceback, say
        mapping.close()
