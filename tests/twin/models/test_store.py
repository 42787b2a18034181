"""Finding models by name and by path."""

from pathlib import Path

import msgspec
import pytest

from tests.worlds import model
from twin.errors import BadFile, UnknownName
from twin.models import load_model


def test_a_model_written_to_a_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_bytes(msgspec.json.encode(model(ngram=True)))
    assert load_model(str(path)) == model(ngram=True)


@pytest.mark.parametrize("name", ["qwen3.8-flash", "qwen3.8-flash-nxet", "flash-next"])
def test_an_unknown_model_suggests_the_nearest(name: str) -> None:
    with pytest.raises(UnknownName) as refused:
        load_model(name)
    assert str(refused.value) == f"unknown model {name!r}"
    assert "qwen3.8-flash-next" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "Expected `object`"),
        ('{"schema": "twin.model/1"}', "missing required field `name`"),
        ('{"hidden": NaN}', "$.hidden is nan"),
        ('{"hidden": 1e999}', "$.hidden is inf"),
        ('{"hidden": 1, "hidden": 2}', "key 'hidden' appears twice"),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_one_line_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadFile) as refused:
        load_model(str(path))
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"missing\.json: cannot be read: No such file or directory"):
        load_model(str(tmp_path / "missing.json"))
