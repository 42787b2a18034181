"""A sequence that was evicted comes back bit for bit, pooled keys included, and a foreign image changes nothing."""

import struct
from collections.abc import Sequence

import pytest
import torch

from realkernels.caches.qsa import QsaCache, Tier
from realkernels.shape import QsaShape
from realkernels.timed import page_images
from realkernels.timed.page_images import (
    HEADER_BYTES,
    EvictPages,
    ImageError,
    RestorePages,
    evict_page,
    image_bytes,
    restore,
)
from tests.realkernels.worlds import SMALL, TIERS, filled


def bits(cache: QsaCache) -> list[torch.Tensor]:
    """A copy of all planes as integers, so that NaN equals itself."""
    groups: list[Sequence[torch.Tensor]] = [cache.keys, cache.values, cache.raw_keys, cache.pooled_keys]
    return [plane.view(torch.int16).clone() for group in groups for plane in group]


@pytest.mark.parametrize("tier", TIERS)
def test_a_sequence_comes_back_bit_for_bit(tier: Tier) -> None:
    """Three pages, the last of 31 tokens; NaN with a payload and negative zeros in it."""
    with filled("torch", tokens=2 * 256 + 31, tier=tier, layers=2) as cache:
        for layer, plane in enumerate((cache.keys[0], cache.raw_keys[1], cache.pooled_keys[1])):
            plane.view(torch.int16)[3 + layer, 0] = 0x7E0B
            plane.view(torch.int16)[100, 0] = -0x8000
        first = bits(cache)
        images = page_images.evict(cache, cache.tokens)
        assert [len(image) for image in images] == [image_bytes(cache, page) for page in range(3)]
        cache.fill_random(2)
        second = bits(cache)
        assert not any(torch.equal(*pair) for pair in zip(first, second, strict=True))
        page_images.restore(cache, images)
        assert all(torch.equal(*pair) for pair in zip(bits(cache), first, strict=True))


def test_an_image_of_one_tier_goes_into_the_other_and_only_where_it_belongs() -> None:
    with filled("torch", tokens=768) as vram, filled("torch", tokens=768, tier="host") as host:
        host.fill_random(9)
        before = bits(host)
        restore(host, [evict_page(vram, 1)], first=1)
        cuts = [slice(256, 512)] * 3 + [slice(64, 128)]
        for cut, now, old, source in zip(cuts, bits(host), before, bits(vram), strict=True):
            assert torch.equal(now[cut], source[cut])
            assert torch.equal(now[: cut.start], old[: cut.start])
            assert torch.equal(now[cut.stop :], old[cut.stop :])


def test_the_layout_is_the_documented_one() -> None:
    """Offsets by hand: 256 rows of 2 x 32 halves, twice, then 256 rows of 16 raw and 64 of 16 pooled."""
    with filled("torch", tokens=512, layers=2) as cache:
        image = evict_page(cache, 1)
        layer_bytes = 2 * 256 * 2 * 32 * 2 + 256 * 16 * 2 + 64 * 16 * 2
        header = struct.unpack("<8s10IQ8x", bytes(image[:64].tolist()))
        assert header == (b"QSAPAGE1", 1, 2, 2, 32, 16, 4, 1, 256, 64, 0, 64 + 2 * layer_bytes)
        assert len(image) == 64 + 2 * layer_bytes
        values = image[64 + layer_bytes + 32768 :][:32768].view(torch.float16).view(256, 2, 32)
        pooled = image[-64 * 16 * 2 :].view(torch.float16).view(64, 16)
        assert torch.equal(values, cache.values[1][256:])
        assert torch.equal(pooled, cache.pooled_keys[1][64:])


def test_an_image_may_be_written_into_memory_that_is_there() -> None:
    with filled("torch", tokens=300) as cache:
        room = torch.empty(image_bytes(cache, 1), dtype=torch.uint8)
        assert evict_page(cache, 1, room) is room
        assert torch.equal(room, evict_page(cache, 1))
        with pytest.raises(ValueError, match="the image takes uint8"):
            evict_page(cache, 0, room)
        assert [page_images.pages(tokens) for tokens in (1, 256, 257)] == [1, 1, 2]


def test_foreign_images_are_refused_and_nothing_is_written() -> None:
    with filled("torch", tokens=512) as cache:
        good = evict_page(cache, 0)
        shapes = {"head_dim": 64, "kv_heads": 3, "index_dim": 32, "ratio": 2}
        foreign: list[tuple[str, torch.Tensor]] = []
        for name, value in shapes.items():
            with filled("torch", tokens=512, shape=QsaShape(**{**vars(SMALL), name: value})) as other:
                foreign.append((f"the image has {name} {value}", evict_page(other, 0)))
        with filled("torch", tokens=512, dtype=torch.bfloat16) as other:
            foreign.append(("the image has dtype 2", evict_page(other, 0)))
        with filled("torch", tokens=512, layers=2) as other:
            foreign.append(("the image has layers 2", evict_page(other, 0)))
        with filled("torch", tokens=100) as other:
            foreign.append(("the image has rows 100", evict_page(other, 0)))
        damaged = good.clone()
        damaged[0] = 0
        foreign += [
            ("the image has page 1", evict_page(cache, 1)),
            ("cut short or too long", good[:-1]),
            ("cut short or too long", torch.cat([good, good[:1]])),
            ("not a page image", good[: HEADER_BYTES - 1]),
            ("not a page image: it begins", damaged),
            ("not a page image", good.to(torch.int16)),
        ]
        cache.fill_random(5)
        before = bits(cache)
        for words, image in foreign:
            with pytest.raises(ImageError, match=words):
                restore(cache, [image])
        with pytest.raises(ImageError):
            page_images.restore(cache, [good, good])  # the second is of page 0: the first must not be written either
        assert all(torch.equal(*pair) for pair in zip(bits(cache), before, strict=True))


def test_pages_that_are_not_there_are_refused() -> None:
    with filled("torch", tokens=300) as cache:
        for page in (-1, 2):
            with pytest.raises(IndexError, match="pages 0 to 1"):
                evict_page(cache, page)
    odd = QsaShape(**{**vars(SMALL), "ratio": 3, "budget": 48})
    with (
        filled("torch", tokens=300, shape=odd) as cache,
        pytest.raises(ValueError, match="blocks of 3 tokens do not divide pages"),
    ):
        evict_page(cache, 0)


@pytest.mark.parametrize("kind", [EvictPages, RestorePages])
def test_copies_are_timed_and_checked(kind: type[EvictPages] | type[RestorePages]) -> None:
    with filled("torch", tokens=600, tier="host", layers=2) as cache:
        timed = kind(cache, pages=2)
        assert timed.verify() == 0
        assert (timed.calls, timed.moved_bytes, timed.link_bytes) == (2, image_bytes(cache, 0), 0)
        cache.values[1][300, 1, 3] += 1
        assert timed.error() == float("inf")
        timed.poison()
        assert not timed.finite()
        assert timed.error() == float("inf")
