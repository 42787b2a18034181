"""Host memory that a device reads in place: anonymous mapping, huge pages, registration, an alias as a CUDA tensor."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

    Huge pages are asked for before the first touch: afterwards the kernel would have to migrate. Whatever happens inside
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
        _close(mapping)


def _registered(mapping: mmap.mmap, address: int, size: int, device: torch.device) -> Iterator[HostSlab]:
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the context must exist before memory is mapped into it
        status = runtime.cudaHostRegister(address, size, PORTABLE_MAPPED)
    if int(status) != 0:
        raise RegistrationError(
            f"registering {size / 2**30:.2f} GiB of host memory failed: CUDA error {int(status)}; "
            "check the locked-memory limit (ulimit -l) and free host memory"
        )
    try:
        host = torch.frombuffer(mapping, dtype=torch.uint8)
        alias = torch.as_tensor(_DevicePointer(address, size), device=device)
        yield HostSlab(nbytes=size, host=host, device=alias)
    finally:
        torch.cuda.synchronize(device)
        runtime.cudaHostUnregister(address)


def _close(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        # A tensor still looks at the mapping (a traceback holds it, say); it is no longer registered, and the last
        # reference unmaps it.
        return
