"""Planes in both tiers: bytes by the shape's own arithmetic, appended rows, pooled keys, nothing left over."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from realkernels.caches.qsa import QsaCache, Tier, pool_blocks, pool_blocks_on_device, qsa_cache, touched_blocks
from realkernels.shape import QsaShape
from realkernels.timed.sparse import DecodeStep, PrefillAttend
from tests.realkernels.worlds import CPU, FORMS, HALVES, SMALL, TIERS, filled

ONE: dict[str, Any] = {"layers": 1, "tokens": 64, "tier": "vram", "device": CPU}


@pytest.mark.parametrize(("tier", "held"), [("vram", (2368, 0)), ("host", (64, 2304))])
def test_bytes_by_tier_are_the_published_ones(tier: Tier, held: tuple[int, int]) -> None:
    """Flash-Next in 16 bits: 2,368 bytes a token and layer, of which 64 stay on the device if the rest is offloaded."""
    with qsa_cache(QsaShape(), layers=2, tokens=512, tier=tier, device=CPU) as cache:
        assert cache.bytes_by_tier() == {"vram": 2 * 512 * held[0], "host": 2 * 512 * held[1]}


@pytest.mark.parametrize("tier", TIERS)
def test_an_odd_number_of_tokens_has_no_pooled_key_for_its_tail(tier: Tier) -> None:
    with qsa_cache(SMALL, layers=3, tokens=103, tier=tier, device=CPU) as cache:
        rows, pooled = 3 * 103 * (2 * 2 * 32 + 16) * 2, 3 * 25 * 16 * 2
        expected = {"vram": rows + pooled, "host": 0} if tier == "vram" else {"vram": pooled, "host": rows}
        assert cache.bytes_by_tier() == expected


@pytest.mark.parametrize("tier", TIERS)
def test_planes_do_not_overlap_and_are_gone_afterwards(tier: Tier) -> None:
    with qsa_cache(SMALL, layers=2, tokens=50, tier=tier, device=CPU) as cache:
        planes = [plane for group in (cache.keys, cache.values, cache.raw_keys, cache.pooled_keys) for plane in group]
        for number, plane in enumerate(planes):
            plane.fill_(number)
        assert all(bool((plane == number).all()) for number, plane in enumerate(planes))
        for layer in range(2):
            assert cache.plane("keys", layer).data_ptr() == cache.keys[layer].data_ptr()
    assert [len(cache.keys), len(cache.values), len(cache.raw_keys), len(cache.pooled_keys)] == [0, 0, 0, 0]


def test_the_offload_tier_leaves_no_file_and_no_mapping(tmp_path: Path) -> None:
    def offloaded() -> AbstractContextManager[QsaCache]:
        return qsa_cache(SMALL, layers=2, tokens=4096, tier="host", device=CPU, folder=str(tmp_path))

    def mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    with offloaded():
        assert list(tmp_path.iterdir()) == []
        assert mapped()
    assert not mapped()
    with pytest.raises(KeyError), offloaded():
        raise KeyError
    assert not mapped()


def test_a_full_disk_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = rf"needs 0.00 GiB of disk, {tmp_path} has .* GiB free"
    with pytest.raises(RuntimeError, match=words), qsa_cache(SMALL, **ONE | {"tier": "host", "folder": str(tmp_path)}):
        pass


def test_vram_that_is_full_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**30, 2**32))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "toy")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    full = r"needs 0.\d\d GiB of VRAM, toy has 1.00 of 4.00 GiB free"
    with filled("triton", tokens=64) as cache:
        monkeypatch.setattr("realkernels.kernels.select.Selection.__init__", refuse)
        with pytest.raises(RuntimeError, match=f"a decode step {full}"):
            DecodeStep(cache, ctx_tokens=64)
        monkeypatch.setattr("realkernels.timed.sparse.select_rows", refuse)
        with pytest.raises(RuntimeError, match=rf"a prefill chunk of 2 rows \(mostly its scores\) {full}"):
            PrefillAttend(cache, ctx_tokens=2, q_tokens=2)
    with pytest.raises(torch.cuda.OutOfMemoryError), qsa_cache(SMALL, **ONE):
        refuse()  # the caller's own is left alone
    monkeypatch.setattr(torch, "empty", refuse)
    with (
        pytest.raises(RuntimeError, match=f"a cache of 1048576 tokens {full}"),
        qsa_cache(SMALL, **ONE | {"tokens": 2**20}),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"tokens": 3}, "tokens is 3, below one block of 4"),
        ({"tier": "tape"}, "no tier 'tape'; there are host, vram"),
        ({"shape": QsaShape(head_dim=48), "triton": True}, "powers of two"),
    ],
)
def test_impossible_caches_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words), qsa_cache(**{"shape": SMALL} | ONE | change):
        pass


def pooled_truth(raw: torch.Tensor) -> torch.Tensor:
    """Means of complete blocks of 4 rows."""
    return raw[: raw.shape[0] // 4 * 4].double().unflatten(0, (-1, 4)).mean(dim=1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("first", "stop"), [(0, 1), (3, 3), (1, 20), (5, 51)])
def test_pooling_touches_its_blocks_only(first: int, stop: int, dtype: torch.dtype) -> None:
    raw = torch.randn(205, 24).to(dtype)
    results = []
    for pool in (pool_blocks, pool_blocks_on_device):
        pooled = torch.full((51, 24), float("nan"), dtype=dtype)
        pool(raw, pooled, range(first, stop), 4)
        assert bool(pooled[:first].isnan().all())
        assert bool(pooled[stop:].isnan().all())
        truth = pooled_truth(raw)[first:stop]
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(pooled[first:stop].double(), truth, rtol=rounding, atol=1e-6)
        results.append(pooled.view(torch.int16)[first:stop].int())
    apart = (results[0] - results[1]).abs()
    allowed = int(dtype == torch.bfloat16)  # the interpreter cuts a float32 down to bfloat16 instead of rounding it
    assert bool((apart <= allowed).all())


def test_the_blocks_that_rows_touch_and_complete() -> None:
    assert touched_blocks(0, 3, 4) == range(0)
    assert touched_blocks(3, 1, 4) == range(1)
    assert touched_blocks(4, 3, 4) == range(1, 1)
    assert touched_blocks(6, 7, 4) == range(1, 3)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", FORMS)
def test_appending_token_by_token_or_at_once_is_the_same(name: str, tier: Tier) -> None:
    rows = [torch.randn(19, 2, 32).half(), torch.randn(19, 2, 32).half(), torch.randn(19, 16).half()]
    states = []
    for sizes in ([1] * 19, [19], [2, 3, 5, 9]):
        with filled(name, tokens=43, tier=tier, layers=2) as cache:
            untouched = [
                cache.pooled_keys[0].clone(),
                cache.pooled_keys[1][:2].clone(),
                cache.pooled_keys[1][7:].clone(),
            ]
            at = 0
            for size in sizes:
                cache.append(1, 10 + at, *[new[at : at + size] for new in rows])
                at += size
            assert torch.equal(cache.keys[1][10:29], rows[0])
            assert torch.equal(cache.values[1][10:29], rows[1])
            assert torch.equal(cache.raw_keys[1][10:29], rows[2])
            truth = pooled_truth(cache.raw_keys[1])
            torch.testing.assert_close(cache.pooled_keys[1][:7].double(), truth[:7], rtol=1e-3, atol=1e-4)
            kept = [cache.pooled_keys[0], cache.pooled_keys[1][:2], cache.pooled_keys[1][7:]]
            assert all(torch.equal(*pair) for pair in zip(kept, untouched, strict=True))
            states.append(cache.pooled_keys[1].clone())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_rows_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    good = [torch.ones(2, 2, 32).half(), torch.ones(2, 2, 32).half(), torch.ones(2, 16).half()]
    with filled("torch", tokens=40) as cache:
        before = cache.keys[0].clone()
        for past in (-1, 39, 40):
            with pytest.raises(ValueError, match="do not lie in planes of 40 tokens"):
                cache.append(0, past, *good)
        for wrong in ([*good[:2], torch.ones(3, 16).half()], [good[0], good[1].float(), good[2]]):
            with pytest.raises(ValueError, match="the plane takes"):
                cache.append(0, 0, *wrong)
        assert torch.equal(cache.keys[0], before)
