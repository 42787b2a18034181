"""Two ways to the same number: bytes against a sum by hand, few chunks against all, a fast link against VRAM."""

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.laws.asked import ROUNDING, SAMPLING, answered, phases
from tests.laws.drawn import LONG_TOKENS, PAGE, SHIPPED, THRESHOLD, machines, questions, with_memory
from tests.laws.floors import KEPT_ON_HOST, PLANES
from tests.worlds import LAWS
from twin.ask.question import Question
from twin.cost.breakdown import Breakdown
from twin.cost.prefill import chunk_at, chunk_count
from twin.cost.roofline import Roofs
from twin.prediction import Prediction, chunk_breakdown, predict
from twin.units import MIB, TIB


def assert_sum_of_chunks(prediction: Prediction) -> None:
    """The predicted prefill is that of every chunk, simulated one by one."""
    case, roofs = prediction.case, Roofs(prediction.machine)
    prompt = case.question.ctx_tokens
    whole = Breakdown()
    for index in range(chunk_count(case, prompt)):
        whole.add(chunk_breakdown(case, chunk_at(case, prompt, index), roofs))
    _, prefill = phases(prediction)
    assert prefill.seconds.value == pytest.approx(whole.seconds, rel=SAMPLING)
    assert (prefill.link_bytes, prefill.link_write_bytes) == pytest.approx(
        (whole.link_bytes, whole.link_write_bytes), rel=ROUNDING, abs=1
    )


def staged_bytes(tokens: int, chunk: int) -> int:
    """What a staged prefill pulls over the link: dense chunks their past, sparse ones every page in use, once."""
    total = 0
    for past in range(0, tokens, chunk):
        end = min(past + chunk, tokens)
        total += past if end <= THRESHOLD else -(-end // PAGE) * PAGE
    return total * PLANES


@settings(LAWS, max_examples=40)
@given(
    questions(longest=1 << 21, layouts=("offload",), prefill="staged", batch=1, pooled="vram", ngram="ram"),
    machines(roomy=True),
    st.sampled_from((512, 3 * 1024, 32 * 1024, 1024 * 1024)),
)
def test_staged_link_bytes_do_not_depend_on_the_staging_buffer(
    question: Question, machine: HardwareProfile, staging_kib: int
) -> None:
    chunk = question.chunk_tokens or 2048
    by_hand = pytest.approx(staged_bytes(question.ctx_tokens - 1, chunk), rel=ROUNDING)
    for asked in (question, replace(question, staging_bytes=staging_kib * 1024)):
        assert phases(answered(asked, machine))[1].link_bytes == by_hand


@LAWS
@given(questions(longest=LONG_TOKENS, layouts=("offload",), pooled="vram"), machines(roomy=True))
def test_every_token_of_a_prompt_is_written_to_the_host_once(question: Question, machine: HardwareProfile) -> None:
    decode, prefill = phases(answered(question, machine))
    assert decode.link_write_bytes == KEPT_ON_HOST * question.batch
    written = (question.ctx_tokens - 1) * KEPT_ON_HOST * question.batch
    assert prefill.link_write_bytes == pytest.approx(written, rel=ROUNDING)


@settings(LAWS, max_examples=80)
@given(questions(longest=1 << 20, shortest=2000), st.sampled_from(SHIPPED))
def test_a_prefill_from_few_chunks_is_the_sum_of_all_its_chunks(question: Question, machine: HardwareProfile) -> None:
    prediction = answered(question, with_memory(machine, TIB))
    assume(chunk_count(prediction.case, question.ctx_tokens) <= 400)
    assert_sum_of_chunks(prediction)


BENDS: dict[str, dict[str, Any]] = {
    "vram": {"ctx_tokens": 1_700_000, "layout": "vram"},  # sparse attention turns from bound by operations to VRAM
    "overlapped": {"ctx_tokens": 1 << 20, "copies": "overlapped", "lanes": 4},  # from bound by kernels to copies
    "naive": {"ctx_tokens": 400_000, "prefill": "naive", "chunk_tokens": 512},
    "naive batch": {"ctx_tokens": 60_000, "prefill": "naive", "batch": 2},
    "odd and short": {"ctx_tokens": 33_056, "staging_bytes": 3 * MIB, "prefill": "staged"},  # no whole buckets a chunk
    "odd": {"ctx_tokens": 154_057, "staging_bytes": 3 * MIB},
    "odd and halved": {"ctx_tokens": 82_609, "staging_bytes": 3 * MIB},
    "odd bytes": {"ctx_tokens": 60_000, "chunk_tokens": 8192, "staging_bytes": 5 * MIB + 123, "prefill": "staged"},
    "odd chunks": {"ctx_tokens": 200_000, "chunk_tokens": 768, "staging_bytes": 7 * MIB, "prefill": "staged"},
    "few and long": {"ctx_tokens": 200_000, "chunk_tokens": 16_384, "staging_bytes": 24 * MIB},
    "large buffer": {"ctx_tokens": 200_000, "staging_bytes": 512 * MIB, "copies": "overlapped"},
    "small buffer": {"ctx_tokens": 200_000, "staging_bytes": 2 * MIB},
    "small chunks": {"ctx_tokens": 200_000, "chunk_tokens": 256, "prefill": "staged"},
    "keys on the host": {"ctx_tokens": 200_000, "pooled": "host", "copies": "overlapped", "chunk_tokens": 8192},
    "vram with rows in RAM": {"ctx_tokens": 200_000, "layout": "vram", "ngram": "ram", "chunk_tokens": 512},
}


@pytest.mark.parametrize("asked", BENDS.values(), ids=BENDS)
def test_a_prefill_that_bends_is_still_the_sum_of_all_its_chunks(asked: dict[str, Any]) -> None:
    assert_sum_of_chunks(predict(Question(**asked), with_memory(load_profile("3x-rtx3090"), TIB)))


def with_link_like_vram(machine: HardwareProfile) -> HardwareProfile:
    """Host links as fast as VRAM, without latency or penalty for short runs, read by equally good kernels."""
    document = msgspec.to_builtins(machine)
    gpu = document["gpu"]
    for name in ("h2d", "d2h"):
        link = gpu[name]
        link["rate"]["value"], link["datasheet"]["value"] = 1e12, 1e12
        link["latency"]["value"] = 1e-8
        link["run_length"]["efficiency"] = [1.0] * len(link["run_length"]["at"])
    gpu["vram_read"]["rate"]["value"] = gpu["vram_read"]["datasheet"]["value"] = 1e12
    for key in [key for key in document["kernels"] if key.startswith("gather_vram/")]:
        for host in ("gather_host", "gather_host_4k"):
            document["kernels"][key.replace("gather_vram", host)] = document["kernels"][key]
    return msgspec.convert(document, HardwareProfile)


@LAWS
@given(questions(longest=LONG_TOKENS, layouts=("offload",), pooled="vram"), machines(roomy=True))
def test_offload_over_a_link_like_vram_decodes_as_fast_as_vram(question: Question, machine: HardwareProfile) -> None:
    assume(question.ctx_tokens >= 16)  # below, the latency of writing the new token sticks out
    same = with_link_like_vram(machine)
    there = Question(ctx_tokens=question.ctx_tokens, layout="vram", batch=question.batch, ngram=question.ngram)
    offload, vram = phases(answered(replace(question, lanes=16), same)), phases(answered(there, same))
    assert offload[0].seconds.value == pytest.approx(vram[0].seconds.value, rel=ROUNDING)
