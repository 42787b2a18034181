"""Machines are found by name or path and read strictly: whatever is wrong with a file is one line with its path."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hwprofiles import load_profile, profile_names
from hwprofiles.errors import BadFile, UnknownName
from hwprofiles.store import DATA, read_json

SHIPPED = (DATA / "rtx3090" / "profile.json").read_text(encoding="utf-8")

Edit = Callable[[dict[str, Any]], object]


def refusal(path: Path) -> str:
    """The message with which the file is refused: one line that begins with its path."""
    with pytest.raises(BadFile) as refused:
        load_profile(str(path))
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_a_shipped_machine_is_read_once() -> None:
    assert load_profile("rtx3090") is load_profile("rtx3090")
    assert {"rtx3090", "3x-rtx3090"} <= set(profile_names())


def test_a_machine_copied_to_a_file_is_the_same_machine(tmp_path: Path) -> None:
    path = tmp_path / "copy.json"
    path.write_text(SHIPPED, encoding="utf-8")
    assert load_profile(str(path)) == load_profile("rtx3090")


@pytest.mark.parametrize(
    ("name", "nearest"), [("rtx3091", "rtx3090"), ("3xrtx3090", "3x-rtx3090"), ("3x", "3x-rtx3090"), ("rtx", "rtx3090")]
)
def test_an_unknown_machine_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownName) as refused:
        load_profile(name)
    assert str(refused.value) == f"unknown machine {name!r}"
    assert refused.value.hint.startswith(f"did you mean {nearest}? known: ")


EDITS: list[tuple[str, Edit, str]] = [
    ("unknown key", lambda data: data["gpu"].update(colour=1), "`colour` - at `$.gpu`"),
    ("missing key", lambda data: data["gpu"].pop("vram"), "`vram` - at `$.gpu`"),
    ("negative", lambda data: data["gpu"]["vram"].update(value=-1), "$.gpu.vram.value"),
    ("zero", lambda data: data["gpu"]["h2d"]["rate"].update(value=0), "$.gpu.h2d.rate.value"),
    ("a word", lambda data: data["gpu"]["vram"].update(value="24 GiB"), "$.gpu.vram.value"),
    ("a truth value", lambda data: data["gpu"]["vram"].update(value=True), "$.gpu.vram.value"),
    ("null", lambda data: data["gpu"].update(vram=None), "$.gpu.vram"),
    ("a huge integer", lambda data: data["gpu"]["vram"].update(value=10**400), "$.gpu.vram.value"),
    ("wrong unit", lambda data: data["gpu"]["vram"].update(unit="s"), "$.gpu.vram: unit must be 'B', not 's'"),
    ("unknown unit", lambda data: data["gpu"]["vram"].update(unit="GiB"), "$.gpu.vram.unit"),
    ("GB/s", lambda data: data["gpu"]["vram_read"]["rate"].update(value=835), "$.gpu.vram_read.rate: 835 B/s"),
    (
        "above datasheet",
        lambda data: data["gpu"]["h2d"]["rate"].update(value=4e10),
        "$.gpu.h2d: the rate 4e+10 is above",
    ),
    ("no samples", lambda data: data["gpu"]["vram"].update(n=0), "$.gpu.vram.n"),
    ("no fitted rows", lambda data: data["gpu"]["vram"].update(source="fitted"), "fitted_on"),
    ("wrong schema", lambda data: data.update(schema="twin.model/1"), "schema must be 'twin.hardware/1'"),
    ("kernel name", lambda data: data["kernels"].update({"a": {"latency": None}}), "kernel"),
]


@pytest.mark.parametrize(("edit", "key"), [row[1:] for row in EDITS], ids=[row[0] for row in EDITS])
def test_a_wrong_value_is_refused_by_file_and_key(tmp_path: Path, edit: Edit, key: str) -> None:
    data = json.loads(SHIPPED)
    edit(data)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert key in refusal(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_none_is_refused_by_its_key(tmp_path: Path, number: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(SHIPPED.replace("25297357373", number), encoding="utf-8")
    assert f"$.gpu.vram.value is {float(number)}, which is not a number" in refusal(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (SHIPPED.encode()[:2000], "not valid JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b'"rtx3090"', "Expected `object`, got `str`"),
        (b"{}", "missing required field `schema`"),
        (b'{"name": "a", "name": "b"}', "key 'name' appears twice"),
        (b'{"gpu": {"name": "a", "b": 1, "name": "c"}}', "key 'name' appears twice"),
        (b'{"name": "\xff"}', "not UTF-8 text (byte 10)"),
        ("\ufeff{}".encode(), "not valid JSON"),
        (SHIPPED.encode("utf-16"), "not UTF-8 text (byte 0)"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=[
        "empty",
        "brace",
        "truncated",
        "list",
        "string",
        "object",
        "repeated",
        "nested",
        "latin-1",
        "BOM",
        "UTF-16",
        "deep",
        "digits",
    ],
)
def test_what_is_no_profile_at_all_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    assert message in refusal(path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("cannot be read: Is a directory")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing.json").endswith("cannot be read: No such file or directory")


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbid)
    assert refusal(tmp_path / "secret.json").endswith("cannot be read: Permission denied")


def test_a_file_lies_over_the_machine_that_it_extends(tmp_path: Path) -> None:
    base = load_profile("rtx3090")
    own = json.loads(SHIPPED)["kernels"]["linear/exllamav3/exl3"]
    path = tmp_path / "own.json"
    path.write_text(
        json.dumps({"extends": "3x-rtx3090", "name": "own", "kernels": {"linear/b/c": own}}), encoding="utf-8"
    )
    profile = load_profile(str(path))
    assert (profile.name, profile.gpu_count, profile.gpu) == ("own", 3, base.gpu)
    assert profile.kernels == base.kernels | {"linear/b/c": base.kernels["linear/exllamav3/exl3"]}


@pytest.mark.parametrize("parent", ['"rtx3091"', '"../rtx3090"', "null", "[]", "{}", "3"])
def test_extending_what_is_not_shipped_is_refused(tmp_path: Path, parent: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(f'{{"extends": {parent}}}', encoding="utf-8")
    assert "which is not a shipped machine" in refusal(path)


def test_a_wrong_value_laid_over_a_shipped_machine_is_blamed_on_the_own_file(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text('{"extends": "rtx3090", "gpu_count": 0}', encoding="utf-8")
    assert "$.gpu_count" in refusal(path)


def test_json_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('{"a": [1, 2.5, "x", null, true]}', encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, "x", None, True]}


@pytest.mark.parametrize("kernels", ["[]", "null", '"ab"'])
def test_kernels_that_are_no_table_are_refused(tmp_path: Path, kernels: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(f'{{"extends": "rtx3090", "kernels": {kernels}}}', encoding="utf-8")
    assert "$.kernels" in refusal(path)


def test_a_wrong_kernel_is_named(tmp_path: Path) -> None:
    data = json.loads(SHIPPED)
    data["kernels"]["scan/exllamav3/fp16"]["efficiency"]["n"] = 0
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert "kernels.scan/exllamav3/fp16" in refusal(path)
