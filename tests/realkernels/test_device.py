"""What a backend says when a device or its memory is missing, and its clock; the GPU is only played."""

import pytest
import torch
from realkernels.triton_backend import TritonBackend

from realkernels import backend as protocol
from realkernels import triton_backend
from tests.realkernels.worlds import BACKENDS, SMALL, backend, filled


def refusal(device: str = "cuda") -> str:
    """The one line with which a device is refused."""
    with pytest.raises(RuntimeError) as caught:
        protocol.open_backend(device)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_driver_that_is_too_old_is_said_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update\nyour driver"
        )

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert refusal() == (
        "no usable GPU: The NVIDIA driver on your system is too old (found version 11040); use device cpu to go without"
    )


def test_gpus_that_are_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GTX 1080")
    assert refusal("cuda:2") == "there is no GPU 2: this machine has 2, numbered from 0"
    assert "GTX 1080 has compute capability 6.1; the kernels need 7.0" in refusal("cuda:1")


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "find_spec", lambda _name: None)
    assert "triton is not installed" in refusal()


def test_out_of_memory_says_what_is_needed_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**30, 2**32))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "toy")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made = TritonBackend(torch.device("cpu"))
    full = "toy has 1.00 of 4.00 GiB free"

    def refuse(*_args: object, **_kwargs: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    with filled("triton", tokens=64) as (_, cache):
        monkeypatch.setattr(triton_backend.SelectionBuffers, "allocate", refuse)
        with pytest.raises(RuntimeError, match=f"a decode step needs 0.00 GiB of VRAM, {full}"):
            made.decode_step(cache, end=64)
        monkeypatch.setattr(triton_backend, "select_rows", refuse)
        with pytest.raises(RuntimeError, match=f"a prefill chunk of 2 rows .* needs 0.00 GiB of VRAM, {full}"):
            made.prefill_chunk(cache, layer=0, past=0, rows=2, mode="in_place")
    with pytest.raises(torch.cuda.OutOfMemoryError), made.cache(SMALL, layers=1, tokens=64, tier="vram"):
        refuse()  # the caller's own is left alone
    monkeypatch.setattr(torch, "empty", refuse)
    words = f"a cache of 1048576 tokens needs 0.29 GiB of VRAM, {full}"
    with pytest.raises(RuntimeError, match=words), made.cache(SMALL, layers=1, tokens=2**20, tier="vram"):
        pass


@pytest.mark.parametrize("name", BACKENDS)
def test_seconds_keeps_each_repeat_and_prepares_every_one(name: str) -> None:
    made, prepared, done = backend(name), [], []
    samples = made.seconds(lambda: done.append(0), repeats=4, warm_up=2, before=prepared.append)
    assert len(samples) == 4
    assert all(sample >= 0 for sample in samples)
    assert prepared == [-2, -1, 0, 1, 2, 3]
    assert len(done) == 6


@pytest.mark.parametrize("name", BACKENDS)
def test_a_models_own_work_comes_before_each_layer(name: str) -> None:
    with filled(name, tokens=64, layers=2) as (made, cache):
        step, seen = made.decode_step(cache, end=64), []
        step.run(before_layer=lambda layer: seen.append((layer, bool(step.output[layer].isnan().any()))))
        assert seen == [(0, True), (1, True)]
        assert step.verify()[0]
