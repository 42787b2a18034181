"""Every wrong input is one line on standard error and exit code 2, or one JSON document where JSON was asked for."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hwprofiles.store import shipped_document
from tests.cli.command import ANSWERED, WRONG_INPUT, assert_one_line, run

PROFILE = shipped_document("rtx3090")

Capture = pytest.CaptureFixture[str]
Edit = Callable[[dict[str, Any]], object]

REFUSED = [
    ("predict --ctx 0", "--ctx: '0' is outside the range of 1 to 2,147,483,647 tokens"),
    ("predict --ctx 1e999", "'1e999' is "),
    (f"predict --ctx {'1' * 5000}", "(5,000 characters) is not a token count"),
    (f"predict --staging {'9' * 5000}GiB", "(5,003 characters) is not a size"),
    ("predict --ctx 1MiB", "write 32768, 256k or 1M"),
    ("predict --ctx", "--ctx"),
    ("predict --batch 1.5", "not a valid integer"),
    ("predict --model qwen3.8-flash", "did you mean qwen3.8-flash-next?"),
    ("predict --hw h800", "'h800' is not shipped (twin profiles lists what is; the nearest, h200, is another machine"),
    ("predict --hw 2x-m3-max", "'2x-m3-max' is not shipped (m3-max cannot be repeated: "),
    ("predict --gpus 0", "number of devices 0 is outside the range of 1 to 1,024 devices"),
    ("predict --gpus 2 --hw m3-max", "2 devices cannot each be the one memory of the host"),
    ("predict --hw gb10 --pcie x4", "gb10: device and host have one memory and no link"),
    ("predict --vram-free 30GiB", "3x-rtx3090: a device has 25,297,357,373 B of VRAM, fewer than 32,212,254,720 B"),
    ("predict --ram 1GiB", "$.host.reserved: 4.29497e+09 B is outside the range of 1 to 1.07374e+09 B"),
    ("predict --pcie gen5x16", "PCIe 5.0 x16 is faster than its own PCIe 4.0 x16, 31.5 GB/s"),
    ("predict --hw rtz3090", "did you mean rtx3090?"),
    ("predict --layout ofload", "did you mean offload?"),
    ("predict --engine exlama", "did you mean exllamav3?"),
    ("predict --kv-dtype fpp16", "did you mean fp16?"),
    ("predict --layout ../vram", "unknown layout '../vram'"),
    ("predict --layout __init__", "unknown layout '__init__'"),
    ("predict --pcie x3", "--pcie: 'x3' is not a PCIe link (write x8, gen3 or gen4x8: "),
    ("predict --nonsense", "No such option '--nonsense'"),
    ("predict leftover", "leftover"),
    ("predict --model no/such/file.json", "no/such/file.json: cannot be read: No such file or directory"),
    ("predict -o .", "is a directory"),
    ("predict --trace .", "is a directory"),
    ("predicct", "No such command 'predicct'"),
    ("compare --staging 32MiB", "No such option '--staging'"),
    ("formats exl3_k1v1", "unknown KV format 'exl3_k1v1' (known: "),
    ("formats exl3_k2v2 --hw h200", "no kernel for exl3_k2v2"),
    ("completion tcsh", "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    ("validate --quick", "go with --device"),
    ("validate --hw h200 --device nothing", "unknown device 'nothing' (known: cpu, cuda, cuda:0, cuda:1, ...)"),
    ("validate --hw no-such --device cpu --record", "unknown machine 'no-such'"),
]
"""What the refusals of tests/golden leave out: the words of the command line, and the nearest of names."""


@pytest.mark.parametrize(("command", "says"), REFUSED)
def test_a_wrong_question_is_refused_in_one_line(capsys: Capture, command: str, says: str) -> None:
    assert_one_line(run(capsys, *command.split()), WRONG_INPUT, says)


@pytest.mark.parametrize("asked", ["--ctx 0", "--model qwen", "--hw no/such.json", "--nonsense", "--pcie x3"])
def test_a_refusal_in_json_is_one_document_and_nothing_else(capsys: Capture, asked: str) -> None:
    done = run(capsys, "predict", "--json", *asked.split())
    assert done.code == WRONG_INPUT
    assert done.err == ""
    error = json.loads(done.out)["error"]
    assert error.keys() == {"type", "message", "hint"}
    assert error["type"] in {"BadValue", "UnknownName", "BadFile", "UsageError"}
    assert error["message"]
    assert "\n" not in error["message"]


STRICT = ("predict", "--strict", "--model", "llama-3.1-8b", "--hw", "h100-pcie", "--ctx", "2k", "--engine", "vllm")


def test_rates_that_were_not_measured_there_are_refused_where_only_those_may_answer(capsys: Capture) -> None:
    assert run(capsys, *(word for word in STRICT if word != "--strict")).code == ANSWERED
    assert_one_line(run(capsys, *STRICT), WRONG_INPUT, "not measured on h100-pcie: ", "linear/library/bf16 (carried)")
    done = run(capsys, *STRICT, "--json")
    assert (done.code, done.err) == (WRONG_INPUT, "")
    error = json.loads(done.out)["error"]
    assert error["type"] == "MissingRate"
    assert error["message"].startswith("not measured on h100-pcie: ")
    assert "--strict" in error["hint"]


def set_at(*path: str, to: Any) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return edit


READ = ("gpu", "vram_read", "rate")
WRONG_PROFILES: dict[str, tuple[Edit, str]] = {
    "unknown key": (set_at(*READ, "valu", to=1), "`valu` - at `$.gpu.vram_read.rate`"),
    "missing key": (lambda document: document["gpu"].pop("vram_read"), "`vram_read` - at `$.gpu`"),
    "negative": (set_at(*READ, "value", to=-1.0), "$.gpu.vram_read.rate.value"),
    "zero": (set_at(*READ, "value", to=0), "$.gpu.vram_read.rate.value"),
    "GB/s written as B/s": (set_at(*READ, "value", to=835.0), "$.gpu.vram_read.rate: 835 B/s is outside the range"),
    "above its peak": (set_at(*READ, "value", to=1e12), "above its datasheet peak"),
    "wrong unit": (set_at(*READ, "unit", to="s"), "$.gpu.vram_read.rate: unit must be 'B/s', not 's'"),
    "unknown unit": (set_at(*READ, "unit", to="GB/s"), "$.gpu.vram_read.rate.unit"),
    "a number in quotes": (set_at(*READ, "value", to="835e9"), "$.gpu.vram_read.rate.value"),
    "not a number": (set_at(*READ, "value", to=float("nan")), "not a number that a data file may hold"),
    "infinite": (set_at(*READ, "value", to=float("inf")), "not a number that a data file may hold"),
    "no devices": (set_at("gpu_count", to=0), "$.gpu_count"),
    "another schema": (set_at("schema", to="twin.hardware/9"), "schema must be 'twin.hardware/1'"),
    "a parent that is not shipped": (set_at("extends", to="rtx9090"), "extends 'rtx9090'"),
}


@pytest.mark.parametrize("case", WRONG_PROFILES)
def test_a_wrong_profile_is_refused_by_file_and_key(capsys: Capture, tmp_path: Path, case: str) -> None:
    edit, says = WRONG_PROFILES[case]
    document = copy.deepcopy(PROFILE)
    edit(document)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert_one_line(run(capsys, "predict", "--hw", str(path)), WRONG_INPUT, f"{path}: ", says)


WRONG_BYTES = {
    "cut short": (b'{"extends": "rtx3090", "name"', "not valid JSON"),
    "empty": (b"", "not valid JSON"),
    "not UTF-8": (b'{"name": "\xff"}', "not UTF-8 text (byte 10)"),
    "UTF-16": (json.dumps(PROFILE).encode("utf-16"), "not UTF-8 text"),
    "another format": (b"name: mine\n", "not valid JSON"),
    "kernels that are none": (b'{"extends": "rtx3090", "kernels": null}', ""),
    "a list": (b"[]", "Expected `object`, got `array`"),
    "a key twice": (b'{"name": "a", "name": "b"}', "key 'name' appears twice"),
    "a number without end": (b'{"gpu_count": 1e999}', "not a number that a data file may hold"),
    "nested without end": (b"[" * 100_000, "not valid JSON"),
    "half a character": (b'{"extends": "rtx3090", "name": "a\\ud800"}', "$.name holds half of a surrogate pair"),
    "half a character in a key": (b'{"\\ud800": 1}', "a key of $ holds half of a surrogate pair"),
}


@pytest.mark.parametrize("case", WRONG_BYTES)
@pytest.mark.parametrize("option", ["--hw", "--model"])
def test_a_file_that_says_nothing_is_refused(capsys: Capture, tmp_path: Path, option: str, case: str) -> None:
    content, says = WRONG_BYTES[case]
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    assert_one_line(run(capsys, "predict", option, str(path)), WRONG_INPUT, f"{path}: ", says)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_refused(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(PROFILE), encoding="utf-8")
    path.chmod(0)
    assert_one_line(run(capsys, "predict", "--hw", str(path)), WRONG_INPUT, "Permission denied")
