"""Registered host memory with a CUDA runtime that is only played: nothing stays registered or mapped on any path."""

import mmap
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from realkernels.caches import host_memory as module
from realkernels.caches.host_memory import RegistrationError, mapped_file, registered
from realkernels.caches.qsa import qsa_cache
from tests.realkernels.worlds import SMALL

CUDA = torch.device("cuda", 0)


class Runtime:
    """Remembers what is registered; refuses the registration number `fail_at`, and synchronising if told so."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.fail_at = 0
        self.broken = False
        self.mappings: list[mmap.mmap] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """As the runtime's: 0, or an error's number."""
        self.calls += 1
        assert flags == 3
        assert address % 4096 == 0
        assert size % 4096 == 0
        if self.calls == self.fail_at:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Unknown addresses are a KeyError."""
        del self.registered[address]
        return 0

    def synchronize(self, *_device: object) -> None:
        """What a kernel that failed leaves behind: every call reports it."""
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    played = Runtime()
    made: Callable[..., mmap.mmap] = mmap.mmap

    def remembered(*args: int, **kwargs: int) -> mmap.mmap:
        played.mappings.append(made(*args, **kwargs))
        return played.mappings[-1]

    class Stream:
        synchronize = staticmethod(played.synchronize)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: played)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", played.synchronize)
    monkeypatch.setattr(module.mmap, "mmap", remembered)
    monkeypatch.setattr(module, "_device_view", lambda _address, size, _device: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(module, "_forget_last_error", lambda _device: None)
    return played


def test_a_slab_is_whole_pages_of_zeros_and_goes_away(runtime: Runtime) -> None:
    with registered(5000, device=CUDA) as slab:
        assert (slab.nbytes, slab.host.shape, slab.device.shape) == (8192, (8192,), (8192,))
        assert not slab.host.any()
        assert list(runtime.registered.values()) == [8192]
        assert list(runtime.registered) == [slab.host.data_ptr()]
        del slab
    assert runtime.registered == {}
    assert runtime.mappings[0].closed


def test_an_exception_inside_unregisters(runtime: Runtime) -> None:
    with pytest.raises(KeyError), registered(4096, device=CUDA):
        raise KeyError
    with pytest.raises(RuntimeError, match="illegal memory access"), registered(4096, device=CUDA):
        runtime.broken = True
    assert runtime.registered == {}
    assert all(mapping.closed for mapping in runtime.mappings)


def test_a_refused_registration_leaves_nothing(runtime: Runtime) -> None:
    runtime.fail_at = 1
    words = r"registering 1.00 GiB .* failed: CUDA error 2; .*ulimit -l"
    with pytest.raises(RegistrationError, match=words) as caught, registered(2**30, device=CUDA):
        pass
    assert "\n" not in str(caught.value)
    assert runtime.registered == {}
    assert runtime.mappings[0].closed


def test_a_refusal_in_the_third_layer_gives_the_first_two_back(runtime: Runtime) -> None:
    runtime.fail_at = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_args, **_kwargs: torch.zeros(1))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        with pytest.raises(RegistrationError), qsa_cache(SMALL, layers=4, tokens=64, tier="host", device=CUDA):
            pass
    assert (runtime.calls, runtime.registered) == (3, {})
    assert [mapping.closed for mapping in runtime.mappings] == [True] * 3


def test_a_tensor_that_outlives_the_block_keeps_its_memory_but_not_its_registration(runtime: Runtime) -> None:
    with registered(4096, device=CUDA) as slab:
        kept = slab.host
    assert runtime.registered == {}
    assert not runtime.mappings[0].closed
    assert int(kept.sum()) == 0


def test_no_memory_is_refused() -> None:
    for opened in (registered(0, device=CUDA), mapped_file(0)):
        with pytest.raises(ValueError, match="0 bytes of host memory"), opened:
            pass
