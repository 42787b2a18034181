"""What commands answer: the JSON that scripts rely on, what does not fit, lists, completion the README's example."""

import json
import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hwprofiles import profile_names
from tests.cli.command import ANSWERED, CHILD, DOES_NOT_FIT, run
from twin.case import Question
from twin.engines import load_engine
from twin.layouts import layout_names
from twin.models import model_names
from twin.prediction import predict

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]

BOTH = load_engine("exllamav3").layouts

QUANTITY = {"value": float, "low": float, "high": float}
PHASE = {
    "tokens_per_s": QUANTITY,
    "bound": str,
    "parts_s": dict,
    "speed_of_light_s": dict,
    "link_bytes": int,
    "link_write_bytes": int,
    "floor_s": float,
    "naive_s": float,
    "busy_s": dict,
}
POOL = {"name": str, "capacity_bytes": int, "used_bytes": int, "parts": dict}
CONTRACT = {
    "schema": str,
    "question": {
        "model": str,
        "hw": str,
        "engine": str,
        "layout": str,
        "kv_dtype": str,
        "ctx_tokens": int,
        "batch": int,
        "chunk_tokens": int,
        "lanes": int,
    },
    "fits": bool,
    "max_ctx_tokens": int,
    "max_ctx_tokens_90": {"low": int, "high": int},
    "shortage": str,
    "memory": {
        "cache_vram_bytes": int,
        "cache_host_bytes": int,
        "vram_bytes_per_token": int,
        "host_bytes_per_token": int,
        "page_tokens": int,
        "vram_left_bytes": int,
        "limited_by": str,
        "devices": list,
    },
    "decode": PHASE | {"step_s": QUANTITY},
    "prefill": PHASE | {"ttft_s": QUANTITY, "prefill_s": QUANTITY},
    "assumptions": list,
    "sources": list,
}
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


def test_what_does_not_fit_is_an_answer_with_its_own_code(capsys: Capture) -> None:
    answer = asked(capsys, "predict", "--ctx", "1M", "--layout", "vram", code=DOES_NOT_FIT)
    assert_holds(answer, {**CONTRACT, "decode": type(None), "prefill": type(None)})
    assert not answer["fits"]
    assert answer["max_ctx_tokens"] < answer["question"]["ctx_tokens"]
    assert "GiB of VRAM" in answer["shortage"]


def test_what_does_not_fit_names_both_sides_and_a_way_out(capsys: Capture) -> None:
    done = run(capsys, "predict", "--ctx", "1M", "--layout", "vram")
    assert (done.code, done.err) == (DOES_NOT_FIT, "")
    fits = next(line for line in done.out.splitlines() if line.startswith("  fits"))
    assert "NO: needs " in fits
    assert "of VRAM, the machine has 70.68 GiB" in fits
    tip = next(line for line in done.out.splitlines() if line.startswith("  try"))
    assert "--layout offload" in tip
    assert "--ctx " in tip
    longest = tip.split("--ctx ")[1].split(";")[0]
    assert run(capsys, "predict", "--ctx", longest, "--layout", "vram").code == ANSWERED


def test_a_comparison_holds_a_prediction_of_every_layout(capsys: Capture) -> None:
    answer = asked(capsys, "compare", "--ctx", "200k")
    assert answer["schema"] == "twin.comparison/1"
    assert [each["question"]["layout"] for each in answer["predictions"]] == list(BOTH)
    for each in answer["predictions"]:
        assert_holds(each, CONTRACT)
        assert each == asked(capsys, "predict", "--ctx", "200k", "--layout", each["question"]["layout"])


def test_a_comparison_fails_only_if_nothing_fits(capsys: Capture) -> None:
    assert run(capsys, "compare", "--ctx", "1M").code == ANSWERED
    assert run(capsys, "compare", "--ctx", "1024M").code == DOES_NOT_FIT


def test_a_comparison_shows_a_column_a_layout(capsys: Capture) -> None:
    done = run(capsys, "compare", "--ctx", "200k")
    heads = done.out.splitlines()[2].split()
    assert heads == list(BOTH)
    assert "204,800 tokens" in done.out


@pytest.mark.parametrize(
    ("command", "names"),
    [("profiles", profile_names()), ("models", model_names()), ("layouts", layout_names())],
    ids=["profiles", "models", "layouts"],
)
def test_a_list_names_everything_that_is_shipped(capsys: Capture, command: str, names: list[str]) -> None:
    done = run(capsys, command)
    assert (done.code, done.err) == (ANSWERED, "")
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == names
    assert [row["name"] for row in asked(capsys, command)] == names


@pytest.mark.parametrize(
    ("command", "name"), [("profiles", "3x-rtx3090"), ("models", "qwen3.8-flash-next")], ids=["profiles", "models"]
)
def test_one_of_a_list_is_shown_whole_and_can_be_used_as_a_file(
    capsys: Capture, tmp_path: Path, command: str, name: str
) -> None:
    done = run(capsys, command, name)
    assert (done.code, done.err) == (ANSWERED, "")
    assert done.out.startswith(f"{name}: ")
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps(asked(capsys, command, name)), encoding="utf-8")
    option = {"profiles": "--hw", "models": "--model"}[command]
    assert asked(capsys, "predict", option, str(copy)) == asked(capsys, "predict")


def test_every_rate_of_a_machine_is_shown_with_its_source(capsys: Capture) -> None:
    done = run(capsys, "profiles", "rtx3090")
    assert "…" not in done.out  # nothing is cut off
    for rate in ("vram", "h2d", "h2d.latency", "h2d.run_length", "linear/exllamav3/exl3#efficiency"):
        assert any(line.split()[:1] == [rate] for line in done.out.splitlines()), rate


def test_the_version_is_the_package_s(capsys: Capture) -> None:
    assert run(capsys, "--version").out == f"twin, version {version('kv-twin')}\n"


@pytest.mark.parametrize("command", ["", "predict", "compare", "validate", "profiles", "models", "layouts"])
def test_help_is_there_for_every_command(capsys: Capture, command: str) -> None:
    done = run(capsys, *command.split(), "-h")
    assert (done.code, done.err) == (ANSWERED, "")
    assert done.out.startswith("Usage: twin")


def test_without_a_command_help_is_shown(capsys: Capture) -> None:
    done = run(capsys)
    assert (done.code, done.err) == (ANSWERED, "")
    assert done.out == run(capsys, "--help").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_asks_twin(capsys: Capture, shell: str) -> None:
    done = run(capsys, "completion", shell)
    assert (done.code, done.err) == (ANSWERED, "")
    assert f"_TWIN_COMPLETE={shell}_complete" in done.out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("twin pre", {"predict"}),
        ("twin predict --layout ", set(layout_names())),
        ("twin predict --hw rtx", {"rtx3090"}),
        ("twin predict --pcie x", {"x16", "x8", "x4"}),
        ("twin models ", set(model_names())),
    ],
)
def test_a_shell_is_offered_names(typed: str, offered: set[str]) -> None:
    words = typed.split(" ")
    asked_by_bash = {"_TWIN_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    environment = os.environ | asked_by_bash
    done = subprocess.run(CHILD, env=environment, capture_output=True, text=True, check=True)
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == offered


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


def test_the_command_says_what_the_function_answers(capsys: Capture) -> None:
    prediction = predict(Question(ctx_tokens=1 << 20))
    answer = asked(capsys, "predict", "--ctx", "1M")
    assert prediction.decode is not None
    assert answer["decode"]["step_s"]["value"] == prediction.decode.seconds.value
    assert answer["max_ctx_tokens"] == prediction.memory.max_ctx_tokens()
