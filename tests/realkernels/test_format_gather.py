"""Records in host memory, filled and gathered: right against float64 on every device's path, wrong where broken."""

import pytest
import torch

from realkernels import format_gather
from realkernels.codecs.interleaved import BLOCK_CODECS
from realkernels.format_gather import HostGather, RecordCache, record_cache, slab_bytes
from tests.realkernels.worlds import SMALL, TOLERANCE

CPU = torch.device("cpu")
TOKENS = 131


def gathered(name: str, end: int = TOKENS) -> HostGather:
    slabs = [torch.full((slab_bytes(name, shape=SMALL, tokens=TOKENS),), 0xFF, dtype=torch.uint8) for _ in range(2)]
    cache = RecordCache(name, slabs, shape=SMALL, tokens=TOKENS)
    cache.fill()
    return HostGather(cache, end=end)


@pytest.mark.parametrize("name", BLOCK_CODECS)
@pytest.mark.parametrize("end", [64, 97, 131])
def test_the_torch_path_is_attention_over_the_unpacked_selection(name: str, end: int) -> None:
    assert gathered(name, end).verify() < TOLERANCE[torch.float16]


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_the_kernels_and_the_torch_path_agree(name: str) -> None:
    pytest.importorskip("triton")
    timed = gathered(name)
    timed.run()
    in_torch = timed.output.clone()
    timed._attend = timed._kernels()
    timed.output.fill_(float("nan"))
    timed.run()
    assert timed.error() < TOLERANCE[torch.float16]
    assert torch.allclose(timed.output, in_torch, atol=4e-3)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_nothing_but_the_selection_and_the_tail_is_read(name: str) -> None:
    timed = gathered(name)
    timed.run()
    before = timed.output.clone()
    read = format_gather.reference.selected_tokens(timed.selected[0].long(), timed.end, SMALL.ratio)
    others = sorted(set(range(TOKENS)) - set(read.tolist()))
    nan = torch.full((len(others), SMALL.kv_heads, SMALL.head_dim), float("nan"))
    timed.cache.format.append(timed.cache.layers[0], others, nan, nan)
    timed.run()
    assert torch.equal(timed.output, before)


def test_layers_and_blocks_hold_different_numbers() -> None:
    cache = gathered("q4_0").cache
    assert not torch.equal(cache.memory[0], cache.memory[1])
    assert len(cache.memory[0].unique(dim=0)) == cache.blocks


def test_a_wrong_layer_and_an_unwritten_output_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = gathered("int4_per_token_head")
    timed.run()
    assert timed.finite()
    timed.cache.layers.reverse()
    assert timed.error() > 0.1
    timed.poison()
    assert timed.error() == float("inf")
    monkeypatch.setattr(format_gather, "attend_records", lambda *_given: None)
    assert timed.verify() == float("inf")


def test_a_repeated_index_is_refused() -> None:
    timed = gathered("q8_0")
    timed.run()
    timed.selected[1, 0] = timed.selected[1, 1]
    with pytest.raises(IndexError, match="twice"):
        timed.error()


def test_bytes_are_those_of_the_records() -> None:
    timed = gathered("q8_0")
    token = 2 * SMALL.kv_heads * (SMALL.head_dim + 2 * SMALL.head_dim // 32)
    assert timed.link_bytes == (SMALL.budget + 3) * token
    assert timed.cache.memory[0].nbytes == slab_bytes("q8_0", shape=SMALL, tokens=TOKENS) == 33 * 576  # 4 tokens padded


def test_slabs_are_files_without_a_name_and_given_back(tmp_path: object) -> None:
    with record_cache("exl3_k4v4", shape=SMALL, layers=2, tokens=97, device=CPU, folder=str(tmp_path)) as cache:
        assert HostGather(cache, end=97).verify() < TOLERANCE[torch.float16]
    assert not cache.layers
    assert not cache.memory


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16 is not kept in blocks"):
        slab_bytes("bf16", shape=SMALL, tokens=64)
    with pytest.raises(ValueError, match="64 tokens of q4_0 take"):
        RecordCache("q4_0", [torch.zeros(64, dtype=torch.uint8)], shape=SMALL, tokens=64)
    for end in (SMALL.budget - 1, TOKENS + 1):
        with pytest.raises(ValueError, match=f"a context of {end} tokens"):
            gathered("q4_0", end)
