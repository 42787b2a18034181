"""Answers about an engine with a pool of blocks: steps by hand, drafts, cached prompts, and rates that are missing."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.laws.asked import phases
from tests.laws.drawn import with_memory
from tests.twin.memory.pool_worlds import BLOCK, HOST_S, SEQUENTIAL, dense, pool_machine
from twin.ask.question import Question
from twin.cost import roofline
from twin.errors import MissingRate
from twin.prediction import Prediction, predict, tokens_per_step
from twin.units import TIB

RTX3090 = with_memory(load_profile("rtx3090"), TIB)
POOLED: dict[str, Any] = {"model": "qwen3.8-27b-fast", "kv_dtype": "fp8"}

RECURRENT = 8 * (16 + 8 + 2 * 2) + 8 * 8 + 16 * 4
"""Parameters of a recurrent layer of the toy: projections in and out, the convolution."""
WEIGHTS = (2 * (768 + 384) + 2 * (RECURRENT + 384)) / 2
"""Bytes of its layers in 4 bits: attention of 768 parameters in two of them, a feed-forward of 384 in all."""
STATE = 2 * 16 * 2 + 3 * 16 * 2
"""Bytes of one state with its convolution's tail, in 16 bits."""


def without(profile: HardwareProfile, *prefixes: str) -> HardwareProfile:
    kept = {key: rates for key, rates in profile.kernels.items() if not key.startswith(prefixes)}
    assert len(kept) < len(profile.kernels)
    return replace(profile, kernels=kept)


@pytest.fixture
def toy(tmp_path: Path) -> str:
    """The toy model of vLLM with its two drafters, in a file."""
    path = tmp_path / "toy.json"
    path.write_bytes(msgspec.json.encode(replace(dense(), drafters=(SEQUENTIAL, BLOCK))))
    return str(path)


def toy_answer(path: str, ctx_tokens: int = 1000, **asked: Any) -> Prediction:
    return predict(Question(ctx_tokens=ctx_tokens, model=path, **asked), pool_machine(vram_bytes=TIB))


@pytest.mark.parametrize("batch", [1, 5])
def test_a_step_and_the_first_token_of_a_pooled_engine_by_hand(toy: str, batch: int) -> None:
    """Weights once; a state read and written, 1,001 tokens of two layers and 32 logits a sequence; at 1 GB/s.

    No decode step before the first token: prefill covers the last token of the prompt too, and a row of logits.
    """
    answer = toy_answer(toy, batch=batch)
    decode, prefill = phases(answer)
    moved = WEIGHTS + 256 + batch * (2 * 2 * STATE + 2 * 1001 * 64 + 32 * 4)
    assert decode.seconds.value == pytest.approx(moved / 1e9 + HOST_S, rel=1e-9)
    assert decode.tokens_per_s.value == pytest.approx(batch / decode.seconds.value)
    assert prefill.tokens_per_s.value == pytest.approx(batch * 1000 / prefill.seconds.value)
    assert {part.name for part in decode.parts} == {"weights", "state", "attention", "sampling", "host.latency"}
    assert answer.ttft_s is not None
    assert answer.ttft_s.value == pytest.approx(prefill.seconds.value + (256 + batch * 32 * 4) / 1e9 + HOST_S, rel=1e-9)
    assert answer.break_even is None  # without drafts


@pytest.mark.parametrize(("tokens", "accepted", "batch"), [(1, 1.0, 3), (2, 2.5, 1), (4, 5.0, 3)])
def test_a_speculating_step_by_hand(toy: str, tokens: int, accepted: float, batch: int) -> None:
    """A microsecond of overheads; a pass of 50 + 24 B and its cache a drafted token; a verify pass of k + 1 tokens."""
    asked: dict[str, Any] = {"speculation": f"toy-mtp:{tokens}", "accepted": accepted}
    answer = toy_answer(toy, 1000, batch=batch, **asked)
    decode, rows = phases(answer)[0], tokens + 1
    draft = tokens * (50 + 24 + batch * 1001 * 64)
    verify = WEIGHTS + 256 + batch * (2 * (1 + rows) * STATE + 2 * (1000 + rows) * 64 + rows * 32 * 4)
    assert decode.seconds.value == pytest.approx(1e-6 + HOST_S + (draft + verify) / 1e9, rel=1e-9)
    assert decode.tokens_per_s.value == pytest.approx(batch * accepted / decode.seconds.value)
    assert tokens_per_step(answer.case) == batch * accepted


@pytest.mark.parametrize(
    ("accepted", "share"), [(1.5, 0.0), (2.0, 0.0), (4.0, 0.5), (5.0, 0.75), (6.0, 1.0), (9.0, 1.0)]
)
def test_a_step_of_two_kinds_takes_their_mean(toy: str, accepted: float, share: float) -> None:
    """Own blocks of 4 yield 2 tokens, looked-up drafts of 9 yield 6; drafting costs the same before either."""

    def step_s(**asked: Any) -> float:
        return phases(toy_answer(toy, 1000, **asked))[0].seconds.value

    short, long = (step_s(speculation="toy-block:8", accepted=only) for only in (1.0, 9.0))
    assert short < long
    mixed = step_s(speculation="toy-block:8", accepted=accepted)
    assert mixed == pytest.approx((1 - share) * short + share * long, rel=1e-9)
    assert short == pytest.approx(step_s(speculation="toy-block:3", accepted=1.0), rel=1e-9)


@pytest.mark.parametrize("speculation", ["mtp:1", "mtp:3", "mtp:7", "dflash2:7"])
@pytest.mark.parametrize("ctx_tokens", [500, 100_000])
def test_at_break_even_drafting_is_as_fast_as_not_drafting(speculation: str, ctx_tokens: int) -> None:
    question = Question(ctx_tokens=ctx_tokens, **(POOLED | {"kv_dtype": "bf16"}))
    plain, _ = phases(predict(question, RTX3090))
    drafting = replace(question, speculation=speculation, accepted=1.0)
    even = predict(drafting, RTX3090).break_even
    assert even is not None
    assert even > 1  # drafting costs something
    most = 1 + int(speculation.split(":")[1])
    at_even, _ = phases(predict(replace(drafting, accepted=min(even, most)), RTX3090))
    if even <= most:
        assert at_even.tokens_per_s.value == pytest.approx(plain.tokens_per_s.value)
    else:
        assert at_even.tokens_per_s.value < plain.tokens_per_s.value


def test_a_cached_turn_takes_the_published_seconds() -> None:
    """1,167 of 112,655 tokens again: 2.4 s against 151.9; int8 with DFlash2 1,263: 6.1 s against 316.8."""
    for asked, published in (
        (POOLED | {"speculation": "mtp:3", "accepted": 3.0}, 2.4),
        (POOLED | {"kv_dtype": "int8_per_token_head", "speculation": "dflash2:15", "accepted": 3.0}, 6.1),
    ):
        question = Question(ctx_tokens=112_655, cached_tokens=112_655, prefix_caching=True, **asked)
        found = predict(question, RTX3090).ttft_s
        assert found is not None
        assert found.value == pytest.approx(published, rel=0.1)


def test_a_rate_that_one_phase_lacks_is_borrowed_for_that_phase_and_refused_where_only_measured_ones_may_answer() -> (
    None
):
    question, key = Question(ctx_tokens=5000, **POOLED), "attend_dense/flashinfer/fp8"
    whole, poor = predict(question, RTX3090), predict(question, without(RTX3090, "attend_dense/"))
    assert (poor.missing, poor.decode) == ((), whole.decode)
    assert [rung for rung, keys in poor.standing().items() if key in keys] == ["carried"]
    before, after = phases(whole)[1].seconds, phases(poor)[1].seconds
    assert after.high / after.low > before.high / before.low
    with pytest.raises(MissingRate, match=rf"not measured on rtx3090: {key} \(carried\)"):
        predict(replace(question, strict=True), without(RTX3090, "attend_dense/"))


@pytest.fixture
def _nobody_lends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other machine, no other engine has rates."""
    monkeypatch.setattr(roofline, "borrowed", lambda *_: None)


@pytest.mark.usefixtures("_nobody_lends")
def test_a_rate_that_one_phase_lacks_leaves_only_that_phase_out() -> None:
    question = Question(ctx_tokens=5000, **POOLED)
    whole = predict(question, RTX3090)
    assert whole.missing == ()
    no_prefill = predict(question, without(RTX3090, "attend_dense/"))
    assert (no_prefill.decode, no_prefill.prefill, no_prefill.ttft_s) == (whole.decode, None, None)
    assert no_prefill.missing == ("machine rtx3090 has no rate for attend_dense/flashinfer/fp8",)
    assert no_prefill.fits
    no_decode = predict(question, without(RTX3090, "attend_decode/"))
    assert (no_decode.decode, no_decode.prefill) == (None, whole.prefill)
    assert no_decode.ttft_s == whole.ttft_s  # vLLM samples the first token from the prompt's own logits
    assert no_decode.missing == ("machine rtx3090 has no rate for attend_decode/flashinfer/fp8",)
    assert no_decode.break_even is None
    for overhead in ("speculate/", "piecewise/"):  # which only drafting needs
        poor = without(RTX3090, overhead)
        assert predict(question, poor).missing == ()
        drafting = predict(replace(question, speculation="mtp:3", accepted=2.0), poor)
        assert (drafting.decode, drafting.prefill is None) == (None, False)
        assert drafting.missing == (f"machine rtx3090 has no rate for {overhead}vllm/step",)


@pytest.mark.usefixtures("_nobody_lends")
@pytest.mark.parametrize("prefixes", [("attend_decode/", "attend_dense/"), ("linear/",)])
def test_where_both_phases_lack_a_rate_memory_is_answered(prefixes: tuple[str, ...]) -> None:
    question, poor = Question(ctx_tokens=5000, **POOLED), without(RTX3090, *prefixes)
    partial = predict(question, poor)
    assert partial.not_predicted["decode"].startswith(f"machine rtx3090 has no rate for {prefixes[0]}")
    assert partial.not_predicted["prefill"].startswith(f"machine rtx3090 has no rate for {prefixes[-1]}")
    assert (partial.decode, partial.prefill, partial.ttft_s, partial.break_even) == (None, None, None, None)
    assert partial.memory.memories == predict(question, RTX3090).memory.memories
    assert (set(partial.not_predicted), partial.sources) == ({"decode", "prefill"}, {})
    too_long = predict(replace(question, ctx_tokens=10**9), poor)  # nothing is missed where nothing fits
    assert (too_long.fits, too_long.missing) == (False, ())
