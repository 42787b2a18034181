"""What layers of every kind keep, by hand from their configurations."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.twin.memory.pool_worlds import configured
from twin.memory.block_pool import block_plan
from twin.memory.blocks import CacheSpec
from twin.memory.cache_specs import cache_specs
from twin.units import GIB

ATTENTION, WINDOW, STATE = "attention", "sliding", "recurrent"
Kept = tuple[str, int, int, int, int]  # kind, layers, bytes of a token or of a state, window, shortest block
TURBO = "turboquant_4bit_nc"

KEPT: dict[tuple[str, str], list[Kept]] = {
    ("llama-3.1-8b", "bf16"): [(ATTENTION, 32, 2 * 8 * 128 * 2, 0, 16)],
    ("gemma-3-12b", "bf16"): [(WINDOW, 40, 2 * 8 * 256 * 2, 1024, 16), (ATTENTION, 8, 2 * 8 * 256 * 2, 0, 16)],
    ("gpt-oss-20b", "fp8"): [(WINDOW, 12, 2 * 8 * 64, 128, 16), (ATTENTION, 12, 2 * 8 * 64, 0, 16)],
    # global layers have 4 heads of 512; E4B's last 18 of 42 layers read the caches of earlier ones
    ("gemma-4-31b-nvfp4", "bf16"): [(WINDOW, 50, 2 * 16 * 256 * 2, 1024, 16), (ATTENTION, 10, 2 * 4 * 512 * 2, 0, 16)],
    ("gemma-4-e4b", "bf16"): [(WINDOW, 20, 2 * 2 * 256 * 2, 512, 16), (ATTENTION, 4, 2 * 2 * 512 * 2, 0, 16)],
    ("mistral-7b-v0.1", "bf16"): [(WINDOW, 32, 2 * 8 * 128 * 2, 4096, 16)],
    # local chunks are kept whole
    ("llama-4-scout", "bf16"): [(ATTENTION, 36, 2 * 8 * 128 * 2, 0, 16), (ATTENTION, 12, 2 * 8 * 128 * 2, 0, 16)],
    ("deepseek-v3", "bf16"): [(ATTENTION, 61, (512 + 64) * 2, 0, 16)],
    ("deepseek-v3", "fp8"): [(ATTENTION, 61, 512 + 64, 0, 64)],
    ("deepseek-v3.2", "bf16"): [(ATTENTION, 61, (512 + 64) * 2, 0, 64), (ATTENTION, 61, 128 + 4, 0, 64)],
    ("deepseek-v3.2", "fp8"): [(ATTENTION, 61, 512 + 4 * 4 + 64 * 2, 0, 64), (ATTENTION, 61, 128 + 4, 0, 64)],
    # states of inner x state elements, and the last inputs of each convolution
    ("mamba-codestral-7b", "bf16"): [(STATE, 64, (8192 * 128 + (8192 + 2 * 8 * 128) * 3) * 2, 0, 16)],
    ("jamba-v0.1", "bf16"): [(STATE, 28, 8192 * (16 + 3) * 2, 0, 16), (ATTENTION, 4, 2 * 8 * 128 * 2, 0, 16)],
    ("granite-4.0-h-tiny", "bf16"): [
        (STATE, 36, (3072 * 128 + (3072 + 2 * 128) * 3) * 2, 0, 16),
        (ATTENTION, 4, 2 * 4 * 128 * 2, 0, 16),
    ],
    # side by side in every layer
    ("falcon-h1-7b", "bf16"): [
        (STATE, 44, (3072 * 256 + (3072 + 2 * 256) * 3) * 2, 0, 16),
        (ATTENTION, 44, 2 * 2 * 128 * 2, 0, 16),
    ],
    ("qwen3-next-80b-a3b", "bf16"): [
        (STATE, 36, (32 * 128 * 128 + (2 * 16 + 32) * 128 * 3) * 2, 0, 16),
        (ATTENTION, 12, 2 * 2 * 256 * 2, 0, 16),
    ],
    # in fp32 whatever is asked
    ("kimi-linear-48b-a3b", "bf16"): [
        (STATE, 20, 32 * 128 * 128 * 4 + 3 * 32 * 128 * 3 * 2, 0, 16),
        (ATTENTION, 7, (512 + 64) * 2, 0, 16),
    ],
    ("minimax-m1-80k", "bf16"): [(STATE, 70, 64 * 128 * 128 * 2, 0, 16), (ATTENTION, 10, 2 * 8 * 128 * 2, 0, 16)],
    ("lfm2-1.2b", "bf16"): [(STATE, 10, 2048 * 2 * 2, 0, 16), (ATTENTION, 6, 2 * 8 * 64 * 2, 0, 16)],
    # two layers at either end stay in 16 bits; not so in models with states
    ("llama-3.1-8b", TURBO): [(ATTENTION, 4, 2 * 8 * 128 * 2, 0, 32), (ATTENTION, 28, 8 * (66 + 68), 0, 32)],
    ("qwen3-next-80b-a3b", TURBO): [
        (STATE, 36, (32 * 128 * 128 + (2 * 16 + 32) * 128 * 3) * 2, 0, 16),
        (ATTENTION, 12, 2 * (130 + 132), 0, 16),
    ],
}


def kept(specs: list[CacheSpec]) -> Iterator[Kept]:
    for spec in specs:
        yield spec.kind, spec.layers, spec.token_bytes + spec.state_bytes, spec.window, spec.kernel_block


@pytest.mark.parametrize(("name", "kv_dtype"), KEPT)
def test_layers_of_every_kind_keep_what_the_engine_keeps(name: str, kv_dtype: str) -> None:
    found = cache_specs(configured(name, kv_dtype=kv_dtype))
    assert sorted(kept(found)) == sorted(KEPT[name, kv_dtype])


def test_layers_that_share_an_indexers_choice_have_no_keys_of_their_own() -> None:
    case = configured("deepseek-v3.2")
    (mixer,) = case.model.caches
    shared = replace(mixer, indexer=replace(mixer.indexer, shared=True))
    kinds = {kind: replace(layer, mixers=(shared,)) for kind, layer in case.model.kinds.items()}
    model = replace(case.model, kinds=kinds)
    assert list(kept(cache_specs(replace(case, model=model, mixer=shared)))) == [(ATTENTION, 61, 1152, 0, 64)]


@pytest.mark.parametrize(("kv_dtype", "tokens"), [("bf16", 897_616), (TURBO, 2_535_648)])
def test_a_measured_pool_holds_what_it_was_seen_to_hold(kv_dtype: str, tokens: int) -> None:
    """109.57 GiB on one H200 under vLLM 0.26, whose log rounds to 0.01 GiB: by no more than that is either off."""
    plan = block_plan(configured("llama-3.1-8b", kv_dtype=kv_dtype))
    short, long = (plan.blocks_in(int((109.57 + off) * GIB)) * plan.block_tokens for off in (-0.005, 0.005))
    assert short <= tokens <= long
    assert tokens % plan.block_tokens == 0
