"""Machines are found by name or path and read strictly: whatever is wrong with a file is one line with its path."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile, profile_names
from hwprofiles.errors import BadFile, UnknownName
from hwprofiles.files import read_json
from hwprofiles.profile import Kernel
from hwprofiles.rates import Rate
from hwprofiles.shipping import ship
from hwprofiles.store import KERNELS, KERNELS_SCHEMA, MACHINES, shipped_document

SHIPPED = json.dumps(shipped_document("rtx3090"))

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


@pytest.mark.parametrize(("name", "nearest"), [("rtz3090", "rtx3090"), ("3x", "3x-rtx3090"), ("rtx", "rtx3090")])
def test_an_unknown_machine_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownName) as refused:
        load_profile(name)
    assert str(refused.value) == f"unknown machine {name!r}"
    assert refused.value.hint.startswith(f"did you mean {nearest}? known: ")


@pytest.mark.parametrize("name", ["H200", "h-200", "H 200"])
def test_a_machine_is_found_whatever_its_case_and_separators(name: str) -> None:
    assert load_profile(name) is load_profile("h200")


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("h100", "; the nearest, h200, is another machine"),
        ("4090", "; the nearest, rtx3090, is another machine"),
        ("rtx3090ti", "; the nearest, rtx3090, is another machine"),
        ("mi300x", ""),
    ],
)
def test_a_card_that_is_not_shipped_is_no_misspelt_other_one(name: str, other: str) -> None:
    with pytest.raises(UnknownName) as refused:
        load_profile(name)
    assert str(refused.value) == f"machine {name!r} is not shipped"
    assert refused.value.hint == (
        f"shipped: {', '.join(profile_names())}{other}; twin calibrate measures yours, --hw FILE takes a profile"
    )


def test_a_file_beside_is_read_where_no_machine_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "rtx3090"):
        (tmp_path / name).write_text(SHIPPED.replace('"rtx3090"', '"from a file"', 1), encoding="utf-8")
    assert load_profile("mine").name == "from a file"
    assert load_profile("rtx3090").name == load_profile("RTX3090").name == "rtx3090"


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
    ("wrong schema", lambda data: data.update(schema="twin.hardware/9"), "schema must be 'twin.hardware/1'"),
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
    assert refusal(tmp_path).endswith(": a folder, not a twin machine profile")


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
    assert {kernel.machine for kernel in base.kernels.values()} == {"rtx3090"}  # where each was measured
    added = replace(base.kernels["linear/exllamav3/exl3"], machine="own")
    assert profile.kernels == base.kernels | {"linear/b/c": added}


def extending(path: Path, **own: Any) -> HardwareProfile:
    path.write_text(json.dumps({"extends": "h200", **own}), encoding="utf-8")
    return load_profile(str(path))


RATE = {"value": 2.0e10, "unit": "B", "spread": 0.02, "n": 3, "source": "measured", "date": "2026-01-02"}


def tables_of(table: dict[str, Any], *above: str) -> list[tuple[str, ...]]:
    """Where objects with keys lie in a profile: rates, curves, counts and what holds them."""
    inner = [(*above, key) for key, value in table.items() if isinstance(value, dict)]
    return inner + [each for path in inner for each in tables_of(table[path[-1]], *path)]


H200 = json.loads(msgspec.json.encode(load_profile("h200")))
LEAVES = [
    path for path in tables_of(H200) if path[0] != "kernels" and "source" in functools.reduce(dict.get, path, H200)
]


@pytest.mark.parametrize("path", LEAVES, ids="/".join)
def test_what_extends_reaches_down_to_every_rate_and_leaves_all_others(tmp_path: Path, path: tuple[str, ...]) -> None:
    """A copy of the parent's rate with another note, alone in its file, changes that note and nothing else."""
    mine = functools.reduce(dict.get, path, H200) | {"note": "mine"}
    own = functools.reduce(lambda inner, key: {key: inner}, reversed(path), mine)
    expected = json.loads(json.dumps(H200))
    functools.reduce(dict.get, path, expected)["note"] = "mine"
    assert json.loads(msgspec.json.encode(extending(tmp_path / "own.json", **own))) == expected


def test_a_rate_is_replaced_whole(tmp_path: Path) -> None:
    """Half a rate beside another's source and date would be a lie."""
    path = tmp_path / "own.json"
    assert extending(path, gpu={"vram": RATE}).gpu.vram == Rate(**RATE)  # and no note of the parent's
    path.write_text('{"extends": "h200", "gpu": {"vram": {"value": 2e10}}}', encoding="utf-8")
    assert refusal(path).endswith("missing required field `spread` - at `$.gpu.vram`")


def test_a_kernel_is_replaced_whole_and_the_others_stay(tmp_path: Path) -> None:
    base = load_profile("h200")
    key = next(key for key, kernel in base.kernels.items() if kernel.efficiency and kernel.latency)
    latency = msgspec.to_builtins(base.kernels[key].latency)
    kernels = extending(tmp_path / "own.json", kernels={key: {"latency": latency}}).kernels
    assert kernels[key] == Kernel(latency=base.kernels[key].latency, machine="h200")
    assert {each for each in base.kernels if kernels[each] != base.kernels[each]} == {key}


def test_null_takes_a_part_away_that_need_not_be_there(tmp_path: Path) -> None:
    assert load_profile("h200").gpu.instructions is not None
    assert extending(tmp_path / "own.json", gpu={"instructions": None}).gpu.instructions is None


@pytest.mark.parametrize("gpu", ["null", "[]", '"h200"', "7"])
def test_what_replaces_a_table_must_be_one(tmp_path: Path, gpu: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(f'{{"extends": "h200", "gpu": {gpu}}}', encoding="utf-8")
    assert "Expected `object`" in refusal(path)


@pytest.mark.parametrize("depth", [100, 900, 1_100, 100_000])
@pytest.mark.parametrize("key", ["gpu", "kernels", "colour"])
def test_tables_nested_without_end_are_refused_in_one_line(tmp_path: Path, key: str, depth: int) -> None:
    path = tmp_path / "own.json"
    nested = f'{{"{key}": ' * depth + "1" + "}" * depth
    path.write_text(f'{{"extends": "h200", "{key}": {nested}}}', encoding="utf-8")
    assert refusal(path)


def test_machines_that_extend_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, parent in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.json").write_text(f'{{"extends": "{parent}"}}', encoding="utf-8")
    monkeypatch.setattr("hwprofiles.store.MACHINES", tmp_path)
    path = tmp_path / "own.json"
    path.write_text('{"extends": "a"}', encoding="utf-8")
    assert "extends 'a', which extends itself" in refusal(path)


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


def test_a_profile_that_was_shown_is_read_as_the_same_machine(tmp_path: Path) -> None:
    path = tmp_path / "shown.json"
    path.write_text(json.dumps(msgspec.to_builtins(load_profile("3x-rtx3090"))), encoding="utf-8")
    assert load_profile(str(path)) == load_profile("3x-rtx3090")


def test_shipped_files_are_strict_and_hold_a_machine_or_the_kernels_of_one_engine() -> None:
    keys: list[tuple[str, str]] = []
    for path in KERNELS.glob("*.json"):
        file = read_json(path)
        assert (file["schema"], file["engine"]) == (KERNELS_SCHEMA, path.stem)
        assert set(file["machines"]) <= set(profile_names())
        keys += [(machine, key) for machine, kernels in file["machines"].items() for key in kernels]
    assert len(set(keys)) == len(keys)
    for path in MACHINES.glob("*.json"):
        assert read_json(path).keys() <= {"schema", "name", "summary", "gpu_count", "gpu", "host", "extends"}


def test_shipping_what_is_shipped_changes_no_byte(tmp_path: Path) -> None:
    for folder in (MACHINES, KERNELS):
        shutil.copytree(folder, tmp_path / folder.name)
    for name in profile_names():
        ship(shipped_document(name), machines=tmp_path / "machines", kernels=tmp_path / "kernels")
    for folder in (MACHINES, KERNELS):
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in (tmp_path / folder.name).iterdir()
        }


def test_a_new_machine_is_shipped_with_its_kernels_by_engine(tmp_path: Path) -> None:
    for folder in (MACHINES, KERNELS):
        shutil.copytree(folder, tmp_path / folder.name)
    made = {**shipped_document("h200"), "name": "new"}
    ship(made, machines=tmp_path / "machines", kernels=tmp_path / "kernels")
    files = {path.stem: read_json(path)["machines"].get("new", {}) for path in (tmp_path / "kernels").iterdir()}
    assert {engine for engine, kernels in files.items() if kernels} == {"twin", "library"}
    assert files["twin"] | files["library"] == made["kernels"]
    assert read_json(tmp_path / "machines" / "new.json") == {k: v for k, v in made.items() if k != "kernels"}


def test_a_wrong_kernel_is_named(tmp_path: Path) -> None:
    data = json.loads(SHIPPED)
    data["kernels"]["scan/exllamav3/fp16"]["efficiency"]["n"] = 0
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert "kernels.scan/exllamav3/fp16" in refusal(path)
