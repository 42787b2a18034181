"""Planes of both layouts: bytes by the shape's own arithmetic, appended rows, pooled keys, nothing left over."""

import os
from pathlib import Path

import pytest
import torch
from realkernels.backend import Tier
from realkernels.cpu_backend import CpuBackend
from realkernels.layouts import layout_names, layout_of_tier, load_layout

from realkernels import reference
from realkernels.pooling import pool_blocks, touched_blocks
from realkernels.pooling_kernel import pool_blocks_on_device
from realkernels.shape import QsaShape
from tests.realkernels.worlds import BACKENDS, SMALL, backend, filled

TIERS: list[Tier] = ["vram", "host"]


@pytest.mark.parametrize("name", BACKENDS)
def test_bytes_by_tier_are_the_published_ones(name: str) -> None:
    """Flash-Next in 16 bits: 2,368 bytes a token and layer, of which 64 stay on the device if the rest is offloaded."""
    made, shape = backend(name), QsaShape()
    with made.cache(shape, layers=2, tokens=512, tier="vram") as cache:
        assert cache.bytes_by_tier() == {"vram": 2 * 512 * 2368, "host": 0}
    with made.cache(shape, layers=2, tokens=512, tier="host") as cache:
        assert cache.bytes_by_tier() == {"vram": 2 * 512 * 64, "host": 2 * 512 * 2304}


@pytest.mark.parametrize("tier", TIERS)
def test_an_odd_number_of_tokens_has_no_pooled_key_for_its_tail(tier: Tier) -> None:
    with backend("cpu").cache(SMALL, layers=3, tokens=103, tier=tier) as cache:
        rows, pooled = 3 * 103 * (2 * 2 * 32 + 16) * 2, 3 * 25 * 16 * 2
        expected = {"vram": rows + pooled, "host": 0} if tier == "vram" else {"vram": pooled, "host": rows}
        assert cache.bytes_by_tier() == expected


def test_a_layout_is_a_file() -> None:
    assert layout_names() == ["offload", "vram"]
    assert [layout_of_tier(tier).name for tier in TIERS] == ["vram", "offload"]
    with pytest.raises(ValueError, match="no layout 'moon'; there are offload, vram"):
        load_layout("moon")
    with pytest.raises(ValueError, match="no tier 'tape'; there are host, vram"):
        layout_of_tier("tape")  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", TIERS)
def test_planes_do_not_overlap_and_are_gone_afterwards(tier: Tier) -> None:
    with backend("cpu").cache(SMALL, layers=2, tokens=50, tier=tier) as cache:
        planes = [plane for group in (cache.keys, cache.values, cache.raw_keys, cache.pooled_keys) for plane in group]
        for number, plane in enumerate(planes):
            plane.fill_(number)
        assert all(bool((plane == number).all()) for number, plane in enumerate(planes))
        for layer in range(2):
            assert cache.plane("keys", layer).data_ptr() == cache.keys[layer].data_ptr()
    assert [len(cache.keys), len(cache.values), len(cache.raw_keys), len(cache.pooled_keys)] == [0, 0, 0, 0]


def test_the_offload_tier_leaves_no_file_and_no_mapping(tmp_path: Path) -> None:
    made = CpuBackend(folder=str(tmp_path), threads=1)

    def mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    with made.cache(SMALL, layers=2, tokens=4096, tier="host"):
        assert list(tmp_path.iterdir()) == []
        assert mapped()
    assert not mapped()
    with pytest.raises(KeyError), made.cache(SMALL, layers=2, tokens=4096, tier="host"):
        raise KeyError
    assert not mapped()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    made = CpuBackend(folder=str(tmp_path), threads=1)
    with (
        pytest.raises(RuntimeError, match=r"needs 0.00 GiB of disk, .* GiB free"),
        made.cache(SMALL, layers=1, tokens=64, tier="host"),
    ):
        pass


def test_impossible_caches_are_refused() -> None:
    for change, words in (({"layers": 0}, "layers is 0"), ({"tokens": 3}, "tokens is 3, below one block of 4")):
        asked = {"layers": 1, "tokens": 64, "tier": "vram"} | change
        with pytest.raises(ValueError, match=words), backend("cpu").cache(SMALL, **asked):  # type: ignore[arg-type]
            pass
    odd = QsaShape(head_dim=48)
    with (
        pytest.raises(ValueError, match="powers of two"),
        backend("triton").cache(odd, layers=1, tokens=64, tier="vram"),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("first", "stop"), [(0, 1), (3, 3), (1, 20), (5, 51)])
def test_pooling_touches_its_blocks_only(first: int, stop: int, dtype: torch.dtype) -> None:
    raw = torch.randn(205, 24).to(dtype)
    results = []
    for pool in (pool_blocks, pool_blocks_on_device):
        pooled = torch.full((51, 24), float("nan"), dtype=dtype)
        pool(raw, pooled, range(first, stop), 4)
        assert bool(pooled[:first].isnan().all())
        assert bool(pooled[stop:].isnan().all())
        truth = reference.pool_keys(raw, 4)[first:stop]
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(pooled[first:stop].double(), truth, rtol=rounding, atol=1e-6)
        results.append(pooled.view(torch.int16)[first:stop].int())
    apart = (results[0] - results[1]).abs()
    allowed = int(dtype == torch.bfloat16)  # the interpreter cuts a float32 down to bfloat16 instead of rounding it
    assert bool((apart <= allowed).all())


def test_blocks_of_other_sizes_are_pooled_alike() -> None:
    raw = torch.randn(30, 16).half()
    one, other = torch.zeros(10, 16).half(), torch.zeros(10, 16).half()
    pool_blocks(raw, one, range(10), 3)
    pool_blocks_on_device(raw, other, range(10), 3)
    assert torch.equal(one, other)
    torch.testing.assert_close(one.double(), reference.pool_keys(raw, 3), rtol=1e-3, atol=1e-4)


def test_the_blocks_that_rows_touch_and_complete() -> None:
    assert touched_blocks(0, 3, 4) == range(0)
    assert touched_blocks(3, 1, 4) == range(1)
    assert touched_blocks(4, 3, 4) == range(1, 1)
    assert touched_blocks(6, 7, 4) == range(1, 3)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", BACKENDS)
def test_appending_token_by_token_or_at_once_is_the_same(name: str, tier: Tier) -> None:
    rows = [torch.randn(19, 2, 32).half(), torch.randn(19, 2, 32).half(), torch.randn(19, 16).half()]
    states = []
    for sizes in ([1] * 19, [19], [2, 3, 5, 9]):
        with filled(name, tokens=43, tier=tier, layers=2) as (_, cache):
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
            truth = reference.pool_keys(cache.raw_keys[1], 4)
            torch.testing.assert_close(cache.pooled_keys[1][:7].double(), truth[:7], rtol=1e-3, atol=1e-4)
            kept = [cache.pooled_keys[0], cache.pooled_keys[1][:2], cache.pooled_keys[1][7:]]
            assert all(torch.equal(*pair) for pair in zip(kept, untouched, strict=True))
            states.append(cache.pooled_keys[1].clone())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_rows_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    good = [torch.ones(2, 2, 32).half(), torch.ones(2, 2, 32).half(), torch.ones(2, 16).half()]
    with filled("cpu", tokens=40) as (_, cache):
        before = cache.keys[0].clone()
        for past in (-1, 39, 40):
            with pytest.raises(ValueError, match="do not lie in planes of 40 tokens"):
                cache.append(0, past, *good)
        for wrong in ([*good[:2], torch.ones(3, 16).half()], [good[0], good[1].float(), good[2]]):
            with pytest.raises(ValueError, match="the plane takes"):
                cache.append(0, 0, *wrong)
        assert torch.equal(cache.keys[0], before)
