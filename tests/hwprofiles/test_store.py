"""Machines are found by name or path, joined with their kernels and read strictly: what is wrong is one line."""

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
from hwprofiles.shipping import laid_over, main, ship
from hwprofiles.store import KERNEL_KEYS, KERNELS, KERNELS_SCHEMA, MACHINES, OPERATIONS, shipped_document
from twin.ask.question import Question
from twin.prediction import predict

SHIPPED = json.dumps(shipped_document("rtx3090"))
H200 = json.loads(msgspec.json.encode(load_profile("h200")))

Written = Callable[[object], str]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A file that holds a document, or a text or bytes as they are; its path."""

    def write(content: object) -> str:
        path = tmp_path / "own.json"
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def refusal(path: Path | str) -> str:
    """The message with which the file is refused: one line that begins with its path."""
    with pytest.raises(BadFile) as refused:
        load_profile(str(path))
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_a_shipped_machine_is_read_once_and_found_whatever_its_case_and_separators() -> None:
    assert {"h200", "rtx3090", "3x-rtx3090"} <= set(profile_names())
    assert all(load_profile(name) is load_profile("h200") for name in ("h200", "H200", "h-200", "H 200"))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rtz3090", "rtx3090"), ("3x", "3x-rtx3090"), ("m3", "m3-max or m3-ultra"), ("4060ti", "rtx4060ti-16gb"),
        ("h800", "h200"), ("rtx2080", "rtx5080"), ("gtx1080ti", "rtx5070ti"), ("v340l", ""),
    ],
)  # fmt: skip
def test_an_unknown_machine_suggests_the_nearest_and_another_card_is_none_of_ours(name: str, near: str) -> None:
    with pytest.raises(UnknownName) as refused:
        load_profile(name)
    if name in {"rtz3090", "3x", "m3", "4060ti"}:
        assert str(refused.value) == f"unknown machine {name!r}"
        assert refused.value.hint == f"did you mean {near}? known: twin profiles lists them"
    else:
        assert str(refused.value) == f"machine {name!r} is not shipped"
        other = f"; the nearest, {near}, is another machine" if near else ""
        assert refused.value.hint == (
            f"twin profiles lists what is{other}; twin calibrate measures yours, --hw FILE takes a profile or a short "
            "one from its data sheet"
        )


def test_a_file_beside_is_read_where_no_machine_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "rtx3090"):
        (tmp_path / name).write_text(SHIPPED.replace('"rtx3090"', '"from a file"', 1), encoding="utf-8")
    assert load_profile("mine").name == "from a file"
    assert load_profile("rtx3090").name == load_profile("RTX3090").name == "rtx3090"


@pytest.mark.parametrize("name", profile_names())
def test_a_machine_in_one_file_with_its_kernels_is_the_same_machine(written: Written, name: str) -> None:
    """As it is shipped, and as `twin profiles NAME --json` shows it."""
    assert load_profile(written(shipped_document(name))) == load_profile(name)
    assert load_profile(written(msgspec.json.encode(load_profile(name)))) == load_profile(name)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("gpu/colour", 1, "`colour` - at `$.gpu`"),
        ("gpu/vram/value", "24 GiB", "$.gpu.vram.value"),
        ("gpu/vram/value", 10**400, "$.gpu.vram.value"),
        ("gpu/vram", None, "$.gpu.vram"),
        ("gpu/vram/unit", "s", "$.gpu.vram: unit must be 'B', not 's'"),
        ("gpu/vram/source", "fitted", "fitted_on"),
        ("schema", "twin.hardware/9", "schema must be 'twin.hardware/1'"),
        ("kernels/a", {"latency": None}, "kernels.a"),
        ("kernels", [], "$.kernels"),
        ("kernels/scan~exllamav3~fp16/efficiency/n", 0, "kernels.scan/exllamav3/fp16"),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_key(written: Written, path: str, value: object, says: str) -> None:
    data = json.loads(SHIPPED)
    *above, last = (key.replace("~", "/") for key in path.split("/"))
    functools.reduce(dict.get, above, data)[last] = value
    assert says in refusal(written(data))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_none_is_refused_by_its_key(written: Written, number: str) -> None:
    says = f"$.gpu.vram.value is {float(number)}, which is not a number"
    assert says in refusal(written(SHIPPED.replace("25297357373", number)))


NO_JSON = (
    b"", b"{", SHIPPED.encode()[:2000], "\ufeff{}".encode(), b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"
)  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "not valid JSON") for content in NO_JSON),
        (b"[]", "Expected `object`, got `array`"),
        (b'"rtx3090"', "Expected `object`, got `str`"),
        (b"{}", "missing required field `schema`"),
        (b'{"name": "a", "name": "b"}', "key 'name' appears twice"),
        (b'{"gpu": {"name": "a", "b": 1, "name": "c"}}', "key 'name' appears twice"),
        (b'{"gpu": ["\\ud800"]}', "$.gpu[0] holds half of a surrogate pair"),
        (b'{"gpu": {"\\ud800": 1}}', "a key of $.gpu holds half of a surrogate pair"),
        (b'{"name": "\xff"}', "not UTF-8 text (byte 10)"),
        (SHIPPED.encode("utf-16"), "not UTF-8 text (byte 0)"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_no_profile_at_all_is_refused(written: Written, content: bytes, message: str) -> None:
    assert message in refusal(written(content))


def test_what_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(tmp_path).endswith(": a folder, not a twin machine profile")
    assert refusal(tmp_path / "missing.json").endswith("cannot be read: No such file or directory")

    def forbid(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbid)
    assert refusal(tmp_path / "secret.json").endswith("cannot be read: Permission denied")


def test_a_file_lies_over_the_machine_that_it_extends(written: Written) -> None:
    base = load_profile("rtx3090")
    own = shipped_document("rtx3090")["kernels"]["linear/exllamav3/exl3"]
    profile = load_profile(written({"extends": "3x-rtx3090", "name": "own", "kernels": {"linear/b/c": own}}))
    assert (profile.name, profile.gpu_count, profile.gpu) == ("own", 3, base.gpu)
    assert {kernel.machine for kernel in base.kernels.values()} == {"rtx3090"}  # where each was measured
    added = replace(base.kernels["linear/exllamav3/exl3"], machine="own")
    assert profile.kernels == base.kernels | {"linear/b/c": added}


def tables_of(table: dict[str, Any], *above: str) -> list[tuple[str, ...]]:
    """Where objects with keys lie in a profile: rates, curves, counts and what holds them."""
    inner = [(*above, key) for key, value in table.items() if isinstance(value, dict)]
    return inner + [each for path in inner for each in tables_of(table[path[-1]], *path)]


LEAVES = [
    path for path in tables_of(H200) if path[0] != "kernels" and "source" in functools.reduce(dict.get, path, H200)
]


@pytest.mark.parametrize("path", LEAVES, ids="/".join)
def test_what_extends_reaches_down_to_every_rate_and_leaves_all_others(written: Written, path: tuple[str, ...]) -> None:
    """A copy of the parent's rate with another note, alone in its file, changes that note and nothing else."""
    mine = functools.reduce(dict.get, path, H200) | {"note": "mine"}
    own: dict[str, Any] = functools.reduce(lambda inner, key: {key: inner}, reversed(path), mine)
    expected = json.loads(json.dumps(H200))
    functools.reduce(dict.get, path, expected)["note"] = "mine"
    profile = load_profile(written({"extends": "h200", **own}))
    assert json.loads(msgspec.json.encode(profile)) == expected


def test_a_rate_or_a_kernel_is_replaced_whole_and_null_takes_a_part_away(written: Written) -> None:
    """Half a rate beside another's source and date would be a lie."""
    base = load_profile("h200")
    rate = {"value": 2.0e10, "unit": "B", "spread": 0.02, "n": 3, "source": "measured", "date": "2026-01-02"}
    assert base.gpu.vram.note
    assert load_profile(written({"extends": "h200", "gpu": {"vram": rate}})).gpu.vram == Rate(**rate)  # type: ignore[arg-type]
    half = written({"extends": "h200", "gpu": {"vram": {"value": 2e10}}})
    assert refusal(half).endswith("missing required field `spread` - at `$.gpu.vram`")
    key = next(key for key, kernel in base.kernels.items() if kernel.efficiency and kernel.latency)
    latency = msgspec.to_builtins(base.kernels[key].latency)
    kernels = load_profile(written({"extends": "h200", "kernels": {key: {"latency": latency}}})).kernels
    assert kernels[key] == Kernel(latency=base.kernels[key].latency, machine="h200")
    assert {each for each in base.kernels if kernels[each] != base.kernels[each]} == {key}
    assert base.gpu.instructions is not None
    assert load_profile(written({"extends": "h200", "gpu": {"instructions": None}})).gpu.instructions is None


@pytest.mark.parametrize("key", ["gpu", "kernels"])
def test_what_replaces_a_table_must_be_one(written: Written, key: str) -> None:
    for value in (None, [], "h200", 7):
        assert "Expected `object`" in refusal(written({"extends": "h200", key: value}))
    assert "$.gpu_count" in refusal(written({"extends": "rtx3090", "gpu_count": 0}))


@pytest.mark.parametrize("depth", [100, 900, 1_100, 100_000])
@pytest.mark.parametrize("key", ["gpu", "kernels", "colour"])
def test_tables_nested_without_end_are_refused_in_one_line(written: Written, key: str, depth: int) -> None:
    nested = f'{{"{key}": ' * depth + "1" + "}" * depth
    assert refusal(written(f'{{"extends": "h200", "{key}": {nested}}}'))


def test_extending_what_is_not_shipped_or_each_other_is_refused(
    tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    for parent in ("rtx3091", "../rtx3090", None, [], {}, 3):
        assert "which is not a shipped machine" in refusal(written({"extends": parent}))
    for name, parent in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.json").write_text(f'{{"extends": "{parent}"}}', encoding="utf-8")
    monkeypatch.setattr("hwprofiles.store.MACHINES", tmp_path)
    assert "extends 'a', which extends itself" in refusal(written({"extends": "a"}))


def test_shipped_files_are_strict_and_hold_a_machine_or_the_kernels_of_one_engine() -> None:
    keys: list[tuple[str, str]] = []
    for path in KERNELS.glob("*.json"):
        file = read_json(path)
        assert (file["schema"], file["engine"]) == (KERNELS_SCHEMA, path.stem)
        assert set(file["machines"]) <= set(profile_names())
        keys += [(machine, key) for machine, kernels in file["machines"].items() for key in kernels]
    assert len(set(keys)) == len(keys)
    for path in MACHINES.glob("*.json"):
        assert read_json(path).keys() <= {
            "schema",
            "name",
            "summary",
            "gpu_count",
            "gpu",
            "host",
            "extends",
            "datasheet",
        }


def test_shipping_what_is_shipped_changes_no_byte_and_a_new_machine_goes_to_its_engines(
    tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines, kernels = (shutil.copytree(folder, tmp_path / folder.name) for folder in (MACHINES, KERNELS))
    for name in profile_names():
        ship(shipped_document(name), machines=machines, kernels=kernels)
    for folder, copied in ((MACHINES, machines), (KERNELS, kernels)):
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in copied.iterdir()
        }
    made = {**shipped_document("h200"), "name": "new"}
    monkeypatch.setattr(ship, "__kwdefaults__", {"machines": machines, "kernels": kernels})
    main(written(made))
    known = {path.stem: read_json(path)["machines"] for path in kernels.iterdir()}
    files = {engine: machines_of.get("new", {}) for engine, machines_of in known.items()}
    assert {"twin", "library"} < {engine for engine, entries in files.items() if entries}
    assert {key: kernel for entries in files.values() for key, kernel in entries.items()} == made["kernels"]
    assert read_json(machines / "new.json") == {key: value for key, value in made.items() if key != "kernels"}


def test_a_machine_measured_anew_keeps_what_no_sample_tells_of() -> None:
    shipped = shipped_document("h200")
    fitted = {key for key, kernel in load_profile("h200").kernels.items() if kernel.is_fitted}
    measured = {key: value for key, value in shipped["gpu"].items() if key != "peer"}
    key = "linear/twin/bf16"
    anew = laid_over(shipped, {"name": "h200", "gpu": measured, "kernels": {key: shipped["kernels"][key]}})
    assert anew["gpu"] == shipped["gpu"]
    assert anew["kernels"] == {name: shipped["kernels"][name] for name in (*fitted, key)}
    assert "datasheet" not in laid_over(shipped_document("rtx4090"), {"gpu": measured})


FIRST_RELEASE = Path(__file__).parent / "data" / "profile_0_1_0.json"
"""The H200 as release 0.1.0 wrote it, cut down to the kernels of one question."""


def predicted(profile: HardwareProfile) -> tuple[float, float]:
    """Seconds of a decode step and until the first token."""
    asked = {"model": "llama-3.1-8b", "engine": "twin", "layout": "vram", "kv_dtype": "int4_per_token_head"}
    answer = predict(Question(ctx_tokens=102_400, **asked), profile)  # type: ignore[arg-type]
    assert answer.decode is not None
    assert answer.prefill is not None
    return answer.decode.seconds.value, answer.prefill.seconds.value + answer.decode.seconds.value


def test_a_profile_of_an_earlier_release_is_read_in_todays_words_and_predicts_what_it_did(written: Written) -> None:
    text = FIRST_RELEASE.read_text(encoding="utf-8")
    then, today = json.loads(text)["kernels"], load_profile(str(FIRST_RELEASE))
    assert set(then) - set(today.kernels) == {"expand/twin/int4_per_token_head", "merge/twin/fp16"}
    assert set(today.kernels) - set(then) == {"dequantise/twin/int4_per_token_head", "combine/twin/fp16"}
    for old, new in OPERATIONS.items():
        text = text.replace(f'"{old}/', f'"{new}/')
    for old, new in KERNEL_KEYS.items():
        text = text.replace(f'"{old}":', f'"{new}":')
    assert today == load_profile(written(text))
    assert predicted(today) == pytest.approx((0.004660547873911775, 10.50731215644683), rel=1e-9)


def test_an_old_name_replaces_todays_kernel_and_may_not_stand_beside_the_new_one(written: Written) -> None:
    kernel = {"latency": H200["kernels"]["dequantise/twin/q4_0"]["latency"]}
    found = load_profile(written({"extends": "h200", "kernels": {"expand/twin/q8_0": kernel}})).kernels
    assert found.keys() == load_profile("h200").kernels.keys()
    assert found["dequantise/twin/q8_0"].efficiency is None
    for order in (1, -1):
        kernels = {f"{name}/a/b": {"latency": None} for name in ("merge", "combine")[::order]}
        twice = refusal(written({"extends": "h200", "kernels": kernels}))
        assert twice.endswith("merge/a/b and combine/a/b are two names of one kernel")
        rates = {"a/b/c": dict.fromkeys(("merging", "combine")[::order])}
        twice = refusal(written({"extends": "h200", "kernels": rates}))
        assert twice.endswith("a/b/c: merging and combine are two names of one rate")
