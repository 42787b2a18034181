"""Models that are split over files: all parts are read, and what is missing or strange is said of the part."""

from pathlib import Path
from typing import Any

import pytest

from tests.twin.models.gguf.shapes import MODELS
from tests.twin.models.gguf.written import Tensors, write
from twin.errors import BadFile
from twin.models import ModelSpec, load_model
from twin.models.gguf import read_gguf


def split(folder: Path, parts: int = 3, stem: str = "big") -> list[Path]:
    """The small llama in so many files, the metadata in the first."""
    metadata, tensors = MODELS["llama"]
    names = list(tensors)
    paths = []
    for number in range(parts):
        own: Tensors = {name: tensors[name] for name in names[number::parts]}
        keys: dict[str, Any] = {"split.no": number, "split.count": parts, "split.tensors.count": len(tensors)}
        told = metadata | keys if number == 0 else {"general.architecture": "llama"} | keys
        paths.append(write(folder / f"{stem}-{number + 1:05}-of-{parts:05}.gguf", told, own))
    return paths


def spec_of(path: Path) -> ModelSpec:
    return read_gguf(path).spec


def refused(path: Path) -> str:
    with pytest.raises(BadFile) as wrong:
        read_gguf(path)
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


def test_any_part_names_the_whole_model(tmp_path: Path) -> None:
    whole = spec_of(write(tmp_path / "whole.gguf", *MODELS["llama"]))
    specs = [spec_of(path) for path in split(tmp_path)]
    assert specs == [whole] * 3


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    paths = split(tmp_path)
    write(tmp_path / "mmproj-big.gguf", *MODELS["qwen2"])
    assert load_model(str(tmp_path)) == spec_of(paths[0])
    write(tmp_path / "another.gguf", *MODELS["qwen2"])
    with pytest.raises(BadFile, match="a folder with 2 GGUF models: name one of them"):
        load_model(str(tmp_path))


def test_without_a_name_it_is_called_as_its_files_are(tmp_path: Path) -> None:
    metadata = {key: told for key, told in MODELS["llama"].metadata.items() if key != "general.name"}
    tensors = MODELS["llama"].tensors
    assert spec_of(write(tmp_path / "one.gguf", metadata, tensors)).name == "one"
    path = write(tmp_path / "one-00001-of-00001.gguf", metadata | {"split.no": 0, "split.count": 1}, tensors)
    assert spec_of(path).name == "one"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(missing: int, tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[missing].unlink()
    there = paths[0] if missing else paths[2]
    assert refused(there) == f"{paths[missing]}: is not there; the model is split into 3 parts"


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    assert refused(paths[0]) == f"{paths[1]}: split.no is 2, but by its name it should be 1"
    paths = split(tmp_path)
    write(paths[1], {"split.no": 1, "split.count": 3}, {"output.weight": ((256, 1024), "f16")})
    assert refused(paths[0]) in {
        f"{paths[1]}: tensor 'output.weight' is in an earlier part, too",
        f"{paths[2]}: tensor 'output.weight' is in an earlier part, too",
    }
    write(paths[1], {"split.no": 1, "split.count": 3}, {"another.weight": ((256, 1024), "f16")})
    assert "split.tensors.count is 30, but its 3 parts have" in refused(paths[0])
    write(paths[1], {}, {"another.weight": ((256, 1024), "f16")})
    assert refused(paths[0]) == f"{paths[1]}: split.count is None, but by its name it should be 3"
    paths[1].write_bytes(b"GGUF")
    assert refused(paths[0]).startswith(f"{paths[1]}: cut short")


def test_a_part_without_its_number_in_its_name_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path)[0].rename(tmp_path / "first.gguf")
    assert refused(path) == f"{path}: split.count is 3, but its name does not end in -00001-of-00003.gguf"
    path = split(tmp_path)[0].rename(tmp_path / "big-00001-of-00004.gguf")
    assert "split.count is 3" in refused(path)
    write(path, MODELS["llama"].metadata | {"split.count": "3"}, MODELS["llama"].tensors)
    assert refused(path) == f"{path}: split.count: is '3', not a whole number"
    write(path, MODELS["llama"].metadata | {"split.count": 0}, MODELS["llama"].tensors)
    assert "split.count is 0" in refused(path)
