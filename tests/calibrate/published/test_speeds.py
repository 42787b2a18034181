"""Published speeds of whole steps as questions with seconds, and which are passed over, each for its reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.published import speeds
from calibrate.published.speeds import MOST_ALIKE, MOST_SERVED, OUTDATED, UNFUSED, SpeedRow, chooses
from twin.cost.roofline import Roofs
from twin.operations.ops import Step
from twin.prediction import chunk_breakdown, decode_breakdown_of, prefill_breakdown

ASK = {"model": "llama-3.1-8b", "weights": "q4_k_m", "hw": "rtx4090", "engine": "llama.cpp", "ctx_tokens": 1024}
ROW = {"id": "r", "kind": "decode", "group": "g", "depth": 512, "tokens": 128, "batch": 1, "value": 50.0, "ask": ASK}
MANY = {"model": "qwen3-30b-a3b", "weights": "q4_k_m"}
SERVED = {
    "id": "s", "depth": 1024, "tokens": 1000, "batch": 4, "tpot_ms": 20.0, "ttft_ms": 100.0,
    "ask": {"model": "llama-3.1-8b", "hw": "h200", "engine": "vllm", "ctx_tokens": 2048, "batch": 4},
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of files with one row each, like ROW and SERVED but for what is told; of none where that is None."""

    def rows(benchmark: dict[str, Any] | None = None, served: dict[str, Any] | None = None) -> list[SpeedRow]:
        for name, base, changes in (("engines.json", ROW, benchmark), ("serving.json", SERVED, served)):
            own = [] if changes is None else [base | changes | {"ask": base["ask"] | changes.get("ask", {})}]
            (tmp_path / name).write_text(json.dumps(own), encoding="utf-8")
        monkeypatch.setattr(speeds, "ENGINES", tmp_path / "engines.json")
        monkeypatch.setattr(speeds, "SERVING", tmp_path / "serving.json")
        monkeypatch.setattr(speeds, "SETTING", ())
        return list(speeds.speed_rows.__wrapped__())

    return rows


@pytest.mark.parametrize(
    ("changes", "seconds", "grain"),
    [
        ({}, 1 / 50, 1),
        ({"batch": 4, "ask": {"batch": 4}}, 4 / 50, 4),
        ({"kind": "prefill", "depth": 0, "tokens": 1024, "value": 2000.0}, 1024 / 2000, 512),
        ({"kind": "prefill_chunk", "tokens": 256, "value": 2000.0}, 256 / 2000, 256),
    ],
)
def test_a_speed_is_so_many_seconds(read: Any, changes: dict[str, Any], seconds: float, grain: float) -> None:
    (row,) = read(changes)
    assert (row.seconds, row.grain) == (pytest.approx(seconds), grain)
    assert (row.engine, row.named, row.served) == ("llama.cpp", "engines.json rtx4090", False)


@pytest.mark.parametrize(
    "changes",
    [
        {"confidence": "low"},
        {"ask": {"engine": "nobody"}},
        {"ask": {"kv_dtype": "exl3_k2v2"}},  # no format of that engine
        {"batch": MOST_ALIKE + 1, "ask": MANY | {"batch": MOST_ALIKE + 1}},
        *({"group": group} for group in OUTDATED),
    ],
)
def test_a_row_that_tells_nothing_is_passed_over(read: Any, changes: dict[str, Any]) -> None:
    assert read(changes) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"confidence": "medium"},
        {"batch": MOST_ALIKE, "ask": MANY | {"batch": MOST_ALIKE}},
        {"batch": MOST_ALIKE + 1, "ask": {"batch": MOST_ALIKE + 1}},  # nothing to choose
        {"group": OUTDATED[0], "ask": {"hw": "m1-max"}},
    ],
)
def test_a_row_beside_it_is_taken(read: Any, changes: dict[str, Any]) -> None:
    assert len(read(changes)) == 1


def test_a_row_without_flash_attention_ran_on_other_kernels(read: Any) -> None:
    backends = [read({"flash_attention": said})[0].case.backend for said in (False, True, None)]
    assert backends[0] == UNFUSED
    assert backends[1] == backends[2] != UNFUSED


def test_a_row_asks_for_what_was_timed(read: Any) -> None:
    """Decode: the mean step of those timed. A chunk behind others: itself, in passes of the engine's size."""
    (decode,), (prompt,) = read({}), read({"kind": "prefill", "depth": 0, "tokens": 1024})
    roofs = Roofs(decode.machine, strict=False)
    assert decode.breakdown(roofs).seconds == decode_breakdown_of(decode.case, roofs, 512 + 64, 1).seconds
    assert prompt.breakdown(roofs).seconds == prefill_breakdown(prompt.case, roofs).seconds
    (chunk,) = read({"kind": "prefill_chunk", "depth": 4096, "tokens": 768})
    passes = (
        chunk_breakdown(chunk.case, Step(kv_tokens=kv_tokens, q_tokens=q_tokens), roofs).seconds
        for kv_tokens, q_tokens in ((4096, 512), (4608, 256))
    )
    assert chunk.breakdown(roofs).seconds == pytest.approx(sum(passes))


def test_a_served_token_is_a_step_and_what_prompts_of_others_took_beside_it(read: Any) -> None:
    """Three others' prompts of 0.1 s in 1,000 tokens: 0.3 ms of 20."""
    (row,) = read(served={})
    assert (row.seconds, row.served, row.phase) == (pytest.approx(0.0197), True, "decode")
    assert read(served={"batch": MOST_SERVED + 1}) == []
    assert read(served={"ttft_ms": 1000.0}) == []  # 3 ms of 20
    assert read(served={"ask": {"engine": "nobody"}}) == []


def test_shipped_rows_can_be_asked_and_tell_of_experts_where_tokens_choose() -> None:
    rows = speeds.speed_rows()
    assert {row.engine for row in rows} >= {"llama.cpp", "exllamav3", "vllm"}
    assert {*speeds.SETTING} <= {row.id for row in rows}
    assert all(row.seconds > 0 for row in rows)
    assert not any(chooses(row.case) for row in rows if row.case.question.batch > MOST_ALIKE and not row.served)
