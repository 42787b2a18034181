"""Interleaved blocks: bytes of each part, and codecs' own append and dequantise on them."""

import pytest
import torch

from realkernels.caches.interleaved import (
    BLOCK_ALIGNMENT,
    BLOCK_CODECS,
    block_layout,
    block_planes,
    code_bytes,
    scales_shape,
)
from realkernels.codecs import codec_named

BYTES = {
    "int4_per_token_head": 2_112, "int8_per_token_head": 4_160, "q4_0": 2_304, "iq4_nl": 2_304, "q5_1": 3_072,
    "q8_0": 4_352, "exl3_k4v4": 2_304,
}  # fmt: skip


def memory_of(name: str, blocks: int, *, head_dim: int = 64) -> torch.Tensor:
    block = block_layout(codec_named(name), block_tokens=4, kv_heads=2, head_dim=head_dim)
    return torch.full((blocks, block.stride), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_a_block_of_the_model_s_heads_needs_no_padding(name: str) -> None:
    codec = codec_named(name)
    block = block_layout(codec, block_tokens=4, kv_heads=2, head_dim=256)
    assert block.stride == BYTES[name] == sum(part.nbytes for part in block.parts)
    assert block.stride == 4 * codec.token_bytes(2, 256)
    assert block.stride % BLOCK_ALIGNMENT == 0


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_a_codec_appends_to_blocks_and_dequantises_them(name: str) -> None:
    codec, slots = codec_named(name), [5, 0, 11, 6]
    memory = memory_of(name, 3)
    planes = block_planes(codec, blocks=3, block_tokens=4, kv_heads=2, head_dim=64, memory=memory)
    paged = codec.allocate(3, 4, 2, 64, torch.device("cpu"))
    rows = torch.randn(2, 4, 2, 64)
    for target in (planes, paged):
        codec.append(target, slots, rows[0], rows[1])
    for found, wanted in zip(codec.restore(planes, slots), codec.restore(paged, slots), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_a_token_is_written_to_its_own_bytes(name: str) -> None:
    """Codes of K and of V, [head, token, ...], then scales [head, K then V, token, ...]."""
    codec = codec_named(name)
    memory = memory_of(name, 2)
    planes = block_planes(codec, blocks=2, block_tokens=4, kv_heads=2, head_dim=64, memory=memory)
    memory.zero_()
    codec.append(planes, [6], torch.randn(1, 2, 64), torch.randn(1, 2, 64))
    block = block_layout(codec, block_tokens=4, kv_heads=2, head_dim=64)
    assert not bool(memory[0].any())
    at = 0
    groups, group_bytes = scales_shape(block)
    for size, planes_of in ((code_bytes(block), 1), (code_bytes(block), 1), (groups * group_bytes, 2)):
        rows = memory[1, at : at + planes_of * 2 * 4 * size].view(2, planes_of, 4, size)
        assert bool(rows[:, :, 2].any(dim=-1).all())
        assert not bool(rows[:, :, [0, 1, 3]].any())
        at += rows.nbytes
    assert not bool(memory[1, at:].any())
    scales = memory[1, at - 2 * 2 * 4 * groups * group_bytes : at].view(2, 2, 4, groups, group_bytes)
    for which, name_of in enumerate(("key_scale", "value_scale")):
        kept = planes.parts[name_of][1, :, 2].contiguous().view(torch.uint8).view(2, groups, -1)
        assert torch.equal(scales[:, which, 2, :, : kept.shape[-1]], kept)


def test_what_does_not_fit_is_refused() -> None:
    codec = codec_named("int4_per_token_head")
    with pytest.raises(ValueError, match="bf16 is not kept in blocks"):
        block_layout(codec_named("bf16"), block_tokens=4, kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="block_tokens is 0"):
        block_layout(codec, block_tokens=0, kv_heads=2, head_dim=64)
    for wrong in (torch.zeros(3, 64, dtype=torch.uint8), memory_of("int4_per_token_head", 3).view(torch.int8)):
        with pytest.raises(ValueError, match="3 interleaved blocks of int4_per_token_head are uint8"):
            block_planes(codec, blocks=3, block_tokens=4, kv_heads=2, head_dim=64, memory=wrong)
