"""What commands answer: the JSON that scripts rely on, what does not fit, explanations, the README's example."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ANSWERED, DOES_NOT_FIT, run
from twin.engines import load_engine

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]

BOTH = load_engine("exllamav3").layouts

QUANTITY = {"value": float, "low": float, "high": float}
PHASE = {
    "tokens_per_s": QUANTITY, "bound": str, "parts_s": dict, "speed_of_light_s": dict, "link_bytes": int,
    "link_write_bytes": int, "floor_s": float, "naive_s": float, "busy_s": dict,
}  # fmt: skip
POOL = {"name": str, "capacity_bytes": int, "used_bytes": int, "parts": dict}
CONTRACT = {
    "schema": str, "fits": bool, "max_ctx_tokens": int, "max_ctx_tokens_90": {"low": int, "high": int},
    "shortage": str, "engine": str,
    "question": {
        "model": str, "hw": str, "engine": str, "layout": str, "kv_dtype": str, "ctx_tokens": int, "batch": int,
        "chunk_tokens": int, "lanes": int,
    },
    "memory": {
        "cache_vram_bytes": int, "cache_host_bytes": int, "vram_bytes_per_token": int, "host_bytes_per_token": int,
        "page_tokens": int, "vram_left_bytes": int, "limited_by": str, "devices": list,
    },
    "decode": PHASE | {"step_s": QUANTITY}, "prefill": PHASE | {"ttft_s": QUANTITY, "prefill_s": QUANTITY},
    "assumptions": list, "sources": list,
}  # fmt: skip
"""Keys may be added to it, never taken away: scripts rely on them."""
SOURCE = {"rate": str, "spread": float, "source": str, "date": str, "fitted_on": list, "note": str}


def assert_holds(document: Any, contract: Mapping[str, Any], path: str = "$") -> None:
    """Every key of the contract is there, with its type."""
    for key, expected in contract.items():
        assert key in document, f"{path}.{key}"
        value = document[key]
        if isinstance(expected, Mapping):
            assert isinstance(value, dict), f"{path}.{key}"
            assert_holds(value, expected, f"{path}.{key}")
        else:
            assert type(value) is expected, f"{path}.{key}: {type(value)}"


def asked(capsys: Capture, *arguments: str, code: int = ANSWERED) -> Any:
    done = run(capsys, *arguments, "--json")
    assert (done.code, done.err) == (code, "")
    return json.loads(done.out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))


@pytest.mark.parametrize("layout", BOTH)
def test_a_prediction_keeps_its_contract(capsys: Capture, layout: str) -> None:
    answer = asked(capsys, "predict", "--ctx", "200k", "--layout", layout)
    assert_holds(answer, CONTRACT)
    assert answer["schema"] == "twin.prediction/1"
    assert answer["question"]["ctx_tokens"] == 200 * 1024
    assert answer["question"]["layout"] == layout
    for pool in answer["memory"]["devices"]:
        assert_holds(pool, POOL)
        assert sum(pool["parts"].values()) == pytest.approx(pool["used_bytes"], abs=len(pool["parts"]))
    assert [pool["name"] for pool in answer["memory"]["devices"]] == ["gpu0", "gpu1", "gpu2", "host"]
    for phase, seconds in (("decode", "step_s"), ("prefill", "prefill_s")):
        whole = answer[phase][seconds]["value"]
        assert sum(answer[phase]["parts_s"].values()) == pytest.approx(whole, rel=1e-9)
    for source in answer["sources"]:
        assert_holds(source, SOURCE)
    assert all(isinstance(line, str) for line in answer["assumptions"])


def test_what_does_not_fit_is_an_answer_with_its_own_code_and_a_way_out(capsys: Capture) -> None:
    question = ("predict", "--ctx", "1M", "--layout", "vram")
    answer = asked(capsys, *question, code=DOES_NOT_FIT)
    assert_holds(answer, {**CONTRACT, "decode": type(None), "prefill": type(None)})
    assert not answer["fits"]
    assert answer["max_ctx_tokens"] < answer["question"]["ctx_tokens"]
    assert "of VRAM, the machine has 70.68 GiB" in answer["shortage"]
    done = run(capsys, *question)
    assert (done.code, done.err) == (DOES_NOT_FIT, "")
    assert f"\n  fits         NO: {answer['shortage']}" in done.out
    tip = next(line for line in done.out.splitlines() if line.startswith("  try"))
    assert "--layout offload" in tip
    assert run(capsys, *question, "--ctx", tip.split("--ctx ")[1].split(";")[0]).code == ANSWERED
    for command in ("predict", "compare"):
        done = run(capsys, command, "--model", "qwen3.8-27b", "--ctx", "8k", "--pool", "20GiB")
        assert (done.code, done.err, "GiB short)" in done.out) == (DOES_NOT_FIT, "", True)


def test_a_comparison_holds_a_prediction_of_every_layout(capsys: Capture) -> None:
    answer = asked(capsys, "compare", "--ctx", "200k")
    assert answer["schema"] == "twin.comparison/1"
    assert [each["question"]["layout"] for each in answer["predictions"]] == list(BOTH)
    for each in answer["predictions"]:
        assert_holds(each, CONTRACT)
        assert each.pop("published_quality") == []
        assert each == asked(capsys, "predict", "--ctx", "200k", "--layout", each["question"]["layout"])


def test_explaining_names_every_part_rate_and_assumption(capsys: Capture) -> None:
    short, long = run(capsys, "predict"), run(capsys, "predict", "--explain")
    assert long.out.startswith(short.out)
    answer = asked(capsys, "predict")
    words = long.out.split()
    for part in (*answer["decode"]["parts_s"], *answer["prefill"]["parts_s"]):
        assert part in words
    for source in answer["sources"]:
        assert source["rate"] in words
    for line in answer["assumptions"]:
        assert line.partition(": ")[2] in long.out
    assert "…" not in long.out


def test_the_readme_shows_what_the_command_prints(capsys: Capture) -> None:
    command = "predict --ctx 1M --layout offload"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split(f"```\n$ twin {command}\n", 1)[1].split("```", 1)[0]
    assert run(capsys, *command.split()).out == block
