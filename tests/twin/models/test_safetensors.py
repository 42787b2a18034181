"""The header of a safetensors file: tensors where they should lie, or one line about what is wrong.

What is wrong with a file's bytes is tested with those who read its tensors, in `calibrate/quality/test_tensors_file`.
"""

import os
from pathlib import Path

import pytest

from tests.twin.models.checkpoints import CHECKPOINTS
from tests.twin.models.written import size, write
from twin.errors import BadFile
from twin.models.safetensors import ELEMENT_BITS, read_header


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_header_says_type_shape_and_size_of_each_tensor(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.safetensors"
    tensors = CHECKPOINTS[case].tensors
    total = write(path, tensors, note="x" * 1000)
    header = read_header(path)
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in header.entries.items()} == tensors
    assert {name: entry.size_bytes for name, entry in header.entries.items()} == {
        name: size(*told) for name, told in tensors.items()
    }
    assert header.data_at + total == path.stat().st_size


@pytest.mark.parametrize("dtype", ELEMENT_BITS)
def test_a_type_has_its_bits(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "x", {"a": (dtype, [2, 3]), "b": (dtype, []), "c": (dtype, [0, 5])})
    entries = read_header(tmp_path / "x").entries
    assert [entry.size_bytes for entry in entries.values()] == [
        6 * ELEMENT_BITS[dtype] // 8,
        ELEMENT_BITS[dtype] // 8,
        0,
    ]


def test_a_file_of_no_tensors_is_one(tmp_path: Path) -> None:
    assert write(tmp_path / "x", {}) == 0
    assert read_header(tmp_path / "x").entries == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_without_waiting_for_who_writes_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(BadFile, match="x: is no file that can be mapped into memory"):
        read_header(tmp_path / "x")
