"""Host memory that a device reads in place: anonymous mapping, huge pages, registration, an alias as a CUDA tensor."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
class HostSlab:
    """Registered host memory. `host` and `device` are the same bytes as tensors of uint8, shape [nbytes]."""

    nbytes: int
    host: torch.Tensor
    device: torch.Tensor


class _DevicePointer:
    """What torch asks of a foreign device array (CUDA Array Interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


@contextmanager
def host_slab(nbytes: int, *, device: torch.device, huge_pages: bool = True) -> Iterator[HostSlab]:
    """`nbytes` (rounded up to a page) of zeroed host memory that kernels on `device` read and write in place.

    Huge pages are asked for before the first touch: afterwards the system would have to migrate. Whatever happens in
    the block, the registration and the mapping are gone after it; use no alias beyond it.
    Raises RegistrationError where the driver refuses (locked-memory limit, too little memory), leaving nothing pinned.
    """
    if nbytes < 1:
        raise ValueError(f"a slab of {nbytes} bytes is none")
    size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
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


def _registered(mapping: mmap.mmap, address: int, size: int, device: torch.device) -> Iterator[HostSlab]:
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
        yield HostSlab(nbytes=size, host=mapped_bytes(mapping), device=_device_view(address, size, device))
    finally:
        try:
            torch.cuda.synchronize(device)
        finally:  # also where a kernel has failed and every call reports it
            runtime.cudaHostUnregister(address)


def _device_view(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_DevicePointer(address, nbytes), device=device)


def _forget_last_error(device: torch.device) -> None:
    """The runtime remembers a refused call as its last error, which the next launch would report as its own."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


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
