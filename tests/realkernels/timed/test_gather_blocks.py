"""Interleaved blocks in host memory, filled and gathered: right against float64 on either path, wrong where broken."""

import math

import pytest
import torch

from realkernels import reference
from realkernels.caches.interleaved import BLOCK_CODECS, InterleavedCache, interleaved_cache, layer_bytes
from realkernels.kernels import gather, in_torch
from realkernels.timed.sparse import GatherBlocks
from tests.realkernels.worlds import CPU, SMALL, TOLERANCE

TOKENS = 131
RIGHT = TOLERANCE[torch.float16]


def gathered(codec: str, ctx_tokens: int = TOKENS) -> GatherBlocks:
    size = layer_bytes(codec, shape=SMALL, tokens=TOKENS)
    slabs = [torch.full((size,), 0xFF, dtype=torch.uint8) for _ in range(2)]
    cache = InterleavedCache(codec, slabs, shape=SMALL, tokens=TOKENS)
    cache.fill()
    return GatherBlocks(cache, ctx_tokens=ctx_tokens)


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("ctx_tokens", [64, 97, 131])
def test_both_paths_are_attention_over_the_dequantised_selection(codec: str, ctx_tokens: int) -> None:
    """And read nothing but the selection and the tail."""
    timed = gathered(codec, ctx_tokens)
    assert timed.verify() < RIGHT
    before = timed.output.clone()
    read = reference.selected_tokens(timed.selected[0].long(), ctx_tokens, SMALL.ratio)
    others = sorted(set(range(TOKENS)) - set(read.tolist()))
    nan = torch.full((len(others), SMALL.kv_heads, SMALL.head_dim), float("nan"))
    timed.cache.codec.append(timed.cache.layers[0], others, nan, nan)
    timed.run()
    assert torch.equal(timed.output, before)
    timed._gather = gather.InterleavedGather(timed.cache.codec, SMALL, device=CPU)
    timed.output.fill_(float("nan"))
    timed.run()
    assert timed.error() < RIGHT
    assert torch.allclose(timed.output, before, atol=4e-3)


def test_layers_and_blocks_hold_different_numbers() -> None:
    cache = gathered("q4_0").cache
    assert not torch.equal(cache.memory[0], cache.memory[1])
    assert len(cache.memory[0].unique(dim=0)) == cache.blocks


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = gathered("int4_per_token_head")
    timed.run()
    assert timed.error() < RIGHT
    timed.cache.layers.reverse()
    assert 0.1 < timed.error() < math.inf
    timed.cache.layers.reverse()
    timed.selected[1, 0] = timed.selected[1, 1]
    assert timed.error() == math.inf
    timed.poison()
    assert timed.error() == math.inf
    monkeypatch.setattr(in_torch.InterleavedGather, "run", lambda *_given, **_named: None)
    assert timed.verify() == math.inf


def test_bytes_are_those_of_the_blocks() -> None:
    timed = gathered("q8_0")
    token = 2 * SMALL.kv_heads * (SMALL.head_dim + 2 * SMALL.head_dim // 32)
    assert timed.link_bytes == (SMALL.budget + 3) * token
    assert timed.cache.memory[0].nbytes == layer_bytes("q8_0", shape=SMALL, tokens=TOKENS) == 33 * 576  # padded


def test_files_have_no_name_and_are_given_back(tmp_path: object) -> None:
    given = {"shape": SMALL, "layers": 2, "tokens": 97, "device": CPU, "folder": str(tmp_path)}
    with interleaved_cache("exl3_k4v4", **given) as cache:
        assert GatherBlocks(cache, ctx_tokens=97).verify() < RIGHT
    assert not cache.layers
    assert not cache.memory


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16 is not kept in blocks"):
        layer_bytes("bf16", shape=SMALL, tokens=64)
    with pytest.raises(ValueError, match="64 tokens of q4_0 take"):
        InterleavedCache("q4_0", [torch.zeros(64, dtype=torch.uint8)], shape=SMALL, tokens=64)
    for ctx_tokens in (SMALL.budget - 1, TOKENS + 1):
        with pytest.raises(ValueError, match=f"a context of {ctx_tokens} tokens"):
            gathered("q4_0", ctx_tokens)
