"""Chunks of a prompt, and that a sample of them stands for all."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles import load_profile
from tests.worlds import LAWS, case, flash_next, machine, model, step
from twin.cost.breakdown import Breakdown
from twin.cost.prefill import chunk_at, chunk_count, prefilled_tokens, sample
from twin.cost.roofline import Roofs
from twin.operations.lower import prefetch_program
from twin.prediction import chunk_breakdown, prefill_breakdown
from twin.units import MAX_TOKENS, MIB

ROOFS = Roofs(load_profile("3x-rtx3090"))


def test_of_rows_that_take_longer_to_fetch_than_a_chunk_what_sticks_out_is_added() -> None:
    asked, chunk, roofs = case(layout="vram", spec=model(ngram=True), ngram="disk"), step(32, 16), Roofs(machine())
    fetch_s = Breakdown().run(prefetch_program(asked, chunk), roofs).seconds
    assert chunk_breakdown(asked, chunk, roofs, fetch=Breakdown()).seconds < fetch_s
    assert chunk_breakdown(asked, chunk, roofs).seconds == pytest.approx(fetch_s)


@pytest.mark.parametrize(
    ("prompt", "count", "last_tokens"),
    [(2, 1, 1), (2049, 1, 2048), (2050, 2, 1), (60_000, 30, 607), (1_048_320, 512, 1791)],
)
def test_all_but_the_last_token_is_prefilled_chunk_by_chunk(prompt: int, count: int, last_tokens: int) -> None:
    asked = flash_next(prompt)
    assert prefilled_tokens(asked, prompt) == prompt - 1
    assert chunk_count(asked, prompt) == count
    last = chunk_at(asked, prompt, count - 1)
    assert (last.kv_tokens, last.q_tokens, last.end) == (2048 * (count - 1), last_tokens, prompt - 1)


def test_a_prompt_of_one_token_has_nothing_to_prefill() -> None:
    assert chunk_count(flash_next(1), 1) == prefill_breakdown(flash_next(1), ROOFS).seconds == 0
    assert sample(flash_next(1), 1, lambda _: 1.0) == {}


RULES = st.fixed_dictionaries(
    {"chunk_tokens": st.sampled_from([16, 64, 256]), "staging_bytes": st.just(1024) | st.integers(512, 64 * 1024)}
)
OPTIONS = {"prefill": st.sampled_from(["auto", "staged", "naive"]), "copies": st.sampled_from(["serial", "overlapped"])}


@LAWS
@given(st.integers(1, 20_000), RULES, st.fixed_dictionaries({}, optional=OPTIONS), st.floats(0, 10))
def test_what_is_linear_in_the_position_is_summed_exactly(
    prompt: int, rules: dict[str, int], options: dict[str, str], slope: float
) -> None:
    asked = case(prompt, rules=rules, **options)
    count = chunk_count(asked, prompt)
    weights = sample(asked, prompt, lambda index: 1 + slope * index)
    assert sum(weights.values()) == pytest.approx(count)
    full = range(prefilled_tokens(asked, prompt) // rules["chunk_tokens"])
    rest = {index: times for index, times in weights.items() if index in full}
    assert sum(index * times for index, times in rest.items()) == pytest.approx(sum(full))
    assert all(0 <= index < count and times > 0 for index, times in weights.items())


@pytest.mark.parametrize(
    ("ctx_tokens", "chunk_tokens", "most"),
    [(262_144, 2048, 60), (1_048_320, 2048, 128), (3_145_728, 2048, 384), (MAX_TOKENS, 256, 100)],
)
@pytest.mark.parametrize(
    "asked", [{"layout": "vram"}, {}, {"staging_bytes": MIB // 2}, {"copies": "overlapped"}, {"prefill": "naive"}]
)
def test_a_long_prompt_needs_few_chunks(ctx_tokens: int, chunk_tokens: int, most: int, asked: dict[str, Any]) -> None:
    of_case = flash_next(ctx_tokens, chunk_tokens=chunk_tokens, **asked)
    simulated: set[int] = set()

    def seconds(index: int) -> float:
        simulated.add(index)
        return chunk_breakdown(of_case, chunk_at(of_case, ctx_tokens, index), ROOFS).seconds

    weights = sample(of_case, ctx_tokens, seconds)
    assert sum(weights.values()) == pytest.approx(chunk_count(of_case, ctx_tokens))
    assert len(simulated | weights.keys()) <= most
