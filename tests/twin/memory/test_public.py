"""Weights, caches and pools against what engines printed on other people's cards (`tests/data/public_memory.json`)."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.memory.plan import MemoryPlan, plan_memory
from twin.units import GIB, MIB

DATA = Path(__file__).parents[2] / "data"
PUBLIC: dict[str, list[dict[str, Any]]] = json.loads((DATA / "public_memory.json").read_text())
UNITS = {"GiB": GIB, "MiB": MIB, "tokens": 1, "bytes": 1}
WEIGHTS = ("weights", "embedding", "vision tower")


def planned(row: dict[str, Any]) -> MemoryPlan:
    """A model is one of `tests/data/models` or a shipped one; towers are beside its configuration."""
    path = DATA / "models" / f"{row['model']}.json"
    model = str(path) if path.exists() else row["model"]
    question = Question(**({"engine": "vllm", "hw": "h200"} | row["question"] | {"model": model}))
    case, machine = settled(question, None)
    case = replace(case, model=replace(case.model, towers=row.get("towers", case.model.towers)))
    return plan_memory(case, machine)


def found(plan: MemoryPlan, compared: str) -> float:
    if compared == "weights":
        return sum(plan.memories[0].fixed.get(part, 0.0) for part in WEIGHTS)
    if compared == "vram":
        return plan.memories[0].used_bytes(plan.pages)
    if compared == "token_bytes":
        return plan.token_bytes.vram_bytes
    assert plan.kv_pool is not None
    if compared == "request":
        return plan.kv_pool.plan.bytes_per_request(plan.case.question.ctx_tokens)
    assert compared == "printed_tokens"
    return plan.kv_pool.printed_tokens


@pytest.mark.parametrize("row", PUBLIC["rows"], ids=lambda row: f"{row['id']} {row['compared']}")
def test_memory_is_what_was_published(row: dict[str, Any]) -> None:
    plan = planned(row)
    assert found(plan, row["compared"]) == pytest.approx(row["value"] * UNITS[row["unit"]], rel=row["tolerance"], abs=0)
    assert plan.fits is row.get("fits", True)


def test_no_row_is_let_off_by_more_than_a_hundredth_or_left_out_without_a_reason() -> None:
    assert all(0 <= row["tolerance"] <= 0.01 for row in PUBLIC["rows"])
    assert all(row["reason"] for row in PUBLIC["left_out"])
