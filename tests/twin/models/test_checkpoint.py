"""Weight bytes of a checkpoint folder: those of its tensors, its index's total, or one line about what is wrong."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.twin.models.checkpoints import AWQ, CHECKPOINTS, LLAMA, LLAVA, PLAIN
from tests.twin.models.written import Checkpoint, sharded, write
from twin.errors import BadFile
from twin.models import ModelSpec
from twin.models.checkpoint import INDEX
from twin.models.store import load_model, understand


def config(folder: Path, told: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")


def refused(folder: Path) -> str:
    with pytest.raises(BadFile) as caught:
        load_model(str(folder))
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix(f"{folder}").removeprefix("/")


def check(spec: ModelSpec, kept: Checkpoint, total: int) -> None:
    """Every part has the bytes of its tensors, and all together those of all tensors."""
    for part, size in spec.weight_bytes.items():
        assert size == pytest.approx(kept.bytes_of(part), rel=1e-12), part
    beside = spec.weights.beside_bytes
    assert beside == {part: kept.bytes_of(part) for part in kept.parts if part not in spec.parameters}
    assert sum(spec.weights.part_bytes.values()) + sum(beside.values()) == total
    assert sum(spec.weight_bytes.values()) + sum(beside.values()) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_weight_bytes_are_those_of_the_tensors(tmp_path: Path, case: str) -> None:
    kept = CHECKPOINTS[case]
    config(tmp_path, kept.config)
    path = tmp_path / "model.safetensors"
    total = write(path, kept.tensors)
    check(load_model(str(tmp_path)), kept, total)
    path.unlink()
    assert sharded(tmp_path, kept.tensors, 3) == total
    check(load_model(str(tmp_path)), kept, total)


@pytest.mark.parametrize("case", ["plain", "vision", "tied and stored again", "gated delta", "nvfp4"])
def test_what_a_config_says_is_what_headers_say_of_a_checkpoint_that_is_as_it_says(tmp_path: Path, case: str) -> None:
    kept = CHECKPOINTS[case]
    config(tmp_path, kept.config)
    said = load_model(str(tmp_path))
    write(tmp_path / "model.safetensors", kept.tensors)
    found = load_model(str(tmp_path))
    for part, size in said.weight_bytes.items():
        assert size == pytest.approx(found.weight_bytes[part], rel=0.02 if part != "vectors" else 0.5), part


def test_headers_say_how_large_a_tower_is_of_which_the_config_says_nothing(tmp_path: Path) -> None:
    config(tmp_path, LLAVA.config)
    write(tmp_path / "model.safetensors", LLAVA.tensors)
    understood = understand(str(tmp_path))
    assert understood.spec.towers == {"vision": LLAVA.bytes_of("vision") // 2}
    assert understood.origins["weight bytes"] == "headers of 1 safetensors files"


# without an index


def test_files_of_other_engines_beside_the_checkpoint_are_left_alone(tmp_path: Path) -> None:
    config(tmp_path, LLAMA)
    total = write(tmp_path / "model.safetensors", PLAIN.tensors)
    write(tmp_path / "consolidated.safetensors", PLAIN.tensors)
    check(load_model(str(tmp_path)), PLAIN, total)


def test_parts_of_one_checkpoint_need_no_index_but_have_to_be_there(tmp_path: Path) -> None:
    config(tmp_path, LLAMA)
    sharded(tmp_path, PLAIN.tensors, 3)
    (tmp_path / INDEX).unlink()
    assert understand(str(tmp_path)).origins["weight bytes"] == "headers of 3 safetensors files"
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert refused(tmp_path) == ": model-00002-of-00003.safetensors is not there beside 2 other parts"


def test_a_single_file_is_the_checkpoint_whatever_its_name_and_several_are_none(tmp_path: Path) -> None:
    config(tmp_path, LLAMA)
    write(tmp_path / "gptq_model-4bit-128g.safetensors", PLAIN.tensors)
    assert "weight bytes" in understand(str(tmp_path)).origins
    write(tmp_path / "other.safetensors", PLAIN.tensors)
    assert "weight bytes" not in understand(str(tmp_path)).origins


# an index without its files


def indexed(folder: Path, kept: Checkpoint, **metadata: Any) -> None:
    config(folder, kept.config)
    index = {"metadata": metadata, "weight_map": dict.fromkeys(kept.tensors, "model-00001-of-00002.safetensors")}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


SCALES = {"exl3", "gptq", "nf4", "masks", "tied and stored as head"}
"""Models so small that scales, tables and masks are more than a few per cent of them."""


@pytest.mark.parametrize("case", sorted(CHECKPOINTS.keys() - SCALES))
def test_an_index_alone_says_how_many_bytes_all_tensors_have(tmp_path: Path, case: str) -> None:
    kept = CHECKPOINTS[case]
    total = sum(kept.bytes_of(part) for part in kept.parts)
    indexed(tmp_path, kept, total_size=total)
    spec = load_model(str(tmp_path))
    beside = spec.weights.beside_bytes
    assert sum(spec.weight_bytes.values()) + sum(beside.values()) == pytest.approx(total, rel=1e-9)


def test_an_index_that_contradicts_the_config_is_refused_with_both_numbers(tmp_path: Path) -> None:
    total = sum(PLAIN.bytes_of(part) for part in PLAIN.parts)
    indexed(tmp_path, PLAIN, total_size=2 * total)
    said = f"metadata.total_size {2 * total:,} and the {total:,} bytes that follow from config.json contradict"
    assert refused(tmp_path) == f"{INDEX}: {said}"


def test_what_lies_beside_the_language_model_is_in_the_total(tmp_path: Path) -> None:
    for kept in (LLAVA, CHECKPOINTS["tied and stored again"]):
        indexed(tmp_path, kept, total_size=sum(kept.bytes_of(part) for part in kept.parts))
        spec = load_model(str(tmp_path))
        (beside,) = kept.parts.keys() & {"vision", "unused"}
        assert spec.weights.beside_bytes == {beside: kept.bytes_of(beside)}
        assert spec.weight_bytes["attention"] == kept.bytes_of("attention")


def test_an_index_without_a_total_says_nothing(tmp_path: Path) -> None:
    indexed(tmp_path, PLAIN)
    assert "weight bytes" not in understand(str(tmp_path)).origins


OUTSIDE = ("../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..\\x.safetensors", "\0.safetensors",
           "pytorch_model.bin", "..", "")  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_names_other_files_is_refused(tmp_path: Path, name: str) -> None:
    config(tmp_path, LLAMA)
    index = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": name}}
    (tmp_path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert refused(tmp_path) == f"{INDEX}: weight_map names {name!r}, which is no safetensors file of its own folder"


def test_a_shard_that_is_missing_beside_others_is_named(tmp_path: Path) -> None:
    config(tmp_path, LLAMA)
    sharded(tmp_path, PLAIN.tensors, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    missing = "names 'model-00002-of-00003.safetensors', which is not there beside 2 that are"
    assert refused(tmp_path) == f"{INDEX}: {missing}"


# links, and what is no file


def cached(home: Path, kept: Checkpoint, name: str) -> Path:
    """A hub's cache: files of a snapshot are links to blobs."""
    folder = home / f"models--{name.replace('/', '--')}"
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "0123abcd"
    for each in (blobs, snapshot, folder / "refs"):
        each.mkdir(parents=True)
    config(blobs, kept.config)
    sharded(blobs, kept.tensors, 2)
    for number, blob in enumerate(sorted(blobs.iterdir())):
        blob.rename(blobs / f"{number:040x}")
        (snapshot / blob.name).symlink_to(f"../../blobs/{number:040x}")
    (folder / "refs" / "main").write_text("0123abcd", encoding="utf-8")
    return folder


def test_links_of_a_hub_cache_are_followed_and_the_model_has_its_name(tmp_path: Path) -> None:
    folder = cached(tmp_path, AWQ, "org/toy-awq")
    total = sum(AWQ.bytes_of(part) for part in AWQ.parts)
    for way in ("", "snapshots/0123abcd", "snapshots/0123abcd/config.json"):
        spec = load_model(str(folder / way))
        assert spec.name == "toy-awq"
        check(spec, AWQ, total)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


SPOILT = {
    "a loop": (loop, "cannot be read: Too many levels of symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file or directory"),
    "a device": (
        lambda path: path.symlink_to("/dev/zero"),
        r"cannot be read: a device, not a file|is no file that can be mapped",
    ),
    "a folder": (lambda path: path.mkdir(), "cannot be read: Is a directory"),
}


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors", "hf_quant_config.json"])
@pytest.mark.parametrize("case", SPOILT)
def test_what_is_no_file_is_refused_by_its_name(tmp_path: Path, name: str, case: str) -> None:
    config(tmp_path, LLAMA)
    make, says = SPOILT[case]
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(BadFile, match=f"^{tmp_path / name}: ({says})"):
        load_model(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors", "hf_quant_config.json"])
def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hwprofiles.files.LONGEST_WAIT_S", 0.05)
    config(tmp_path, LLAMA)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadFile, match=f"^{tmp_path / name}: (a pipe that nobody wrote to|is no file)"):
        load_model(str(tmp_path))


# limits


def test_headers_of_all_shards_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config(tmp_path, LLAMA)
    sharded(tmp_path, PLAIN.tensors, 3)
    monkeypatch.setattr("twin.models.checkpoint.LONGEST_HEADERS", 2000)
    assert "headers up to this one are longer than 2,000 bytes" in refused(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[]", "Expected `object`, got `array`"),
        ("{}", "Object missing required field `weight_map`"),
        ('{"weight_map": []}', r"Expected `object`, got `array` - at `$.weight_map`"),
        ('{"weight_map": {"a": 1}}', r"Expected `str`, got `int` - at `$.weight_map[...]`"),
        ('{"weight_map": {}, "metadata": {"total_size": -1}}', r"at `$.metadata.total_size`"),
        ('{"weight_map": {}, "metadata": {"total_size": 1e30}}', r"at `$.metadata.total_size`"),
        ('{"weight_map": {}, "metadata": {"total_size": NaN}}', "malformed"),
        ('{"weight_map": {}, "metadata": {"total_size": true}}', r"at `$.metadata.total_size`"),
        ('{"weight_map": {}, "metadata": ' + '{"a":' * 100_000, "maximum recursion depth exceeded"),
        ('{"weight_map"', "truncated"),
    ],
)
def test_an_index_that_says_nonsense_is_refused_by_its_key(tmp_path: Path, index: str, says: str) -> None:
    config(tmp_path, LLAMA)
    (tmp_path / INDEX).write_text(index, encoding="utf-8")
    message = refused(tmp_path)
    assert message.startswith(f"{INDEX}: ")
    assert says in message


# how a checkpoint was quantised

MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
ONES = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("name", "said", "bits"), [("hf_quant_config.json", MODELOPT, 8), ("quantize_config.json", ONES, 4 + 20 / 128)]
)
def test_quantisation_that_a_file_beside_says_is_read(tmp_path: Path, name: str, said: Any, bits: float) -> None:
    config(tmp_path, LLAMA)
    (tmp_path / name).write_text(json.dumps(said), encoding="utf-8")
    understood = understand(str(tmp_path))
    assert understood.spec.weights.stored("feed_forward").bits == pytest.approx(bits, rel=0.2)
    assert understood.spec.weights.stored("head").bits == 16
    assert any(key.startswith(f"{name}: ") for key in understood.origins)
    config(tmp_path, LLAMA | {"quantization_config": {"quant_method": "mxfp4"}})  # which goes before it
    assert load_model(str(tmp_path)).weights.stored("feed_forward").bits == 16


def test_what_is_wrong_in_a_file_beside_is_said_of_that_file(tmp_path: Path) -> None:
    config(tmp_path, LLAMA)
    path = tmp_path / "quantize_config.json"
    for said, says in (
        ([], "not a JSON object"),
        ({"bits": 99}, "bits: is 99"),
        ({"quant_method": "x"}, "quant_method: is 'x'"),
    ):
        path.write_text(json.dumps(said), encoding="utf-8")
        assert refused(tmp_path).startswith(f"quantize_config.json: {says}")
