"""What is published of a format's effect on answers: carried as it was published, by family, and never mixed in."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.published.cases import Row, read_published
from twin.answers.quality import QUALITY, Quality, published_quality
from twin.errors import BadFile
from twin.formats import format_names
from twin.models import load_model, model_names

MODEL = load_model("qwen3.8-27b")
FILES = sorted(QUALITY.glob("*.json"))
PUBLISHED = [row for row in read_published("published_rtx3090.json").rows if row.metric == "perplexity"]


def rows_of(path: Path) -> list[Quality]:
    return msgspec.json.decode(path.read_bytes(), type=list[Quality])


@pytest.mark.parametrize("row", PUBLISHED, ids=[row.id for row in PUBLISHED])
def test_every_published_perplexity_is_carried_as_it_was_published(row: Row) -> None:
    conditions = "utilisation 0.93" if row.conditions.get("util") == 0.93 else "batch defaults"
    (found,) = [
        own
        for own in published_quality(MODEL, str(row.conditions["layout"]))
        if own.metric == "perplexity" and conditions in own.conditions
    ]
    assert found.value == row.value


def test_no_perplexity_is_carried_that_was_not_published() -> None:
    carried = [own for path in FILES for own in rows_of(path) if own.metric == "perplexity"]
    assert sorted(own.value for own in carried) == sorted(row.value for row in PUBLISHED)


def test_needles_were_found_in_every_format_that_a_table_gives_them_for() -> None:
    """At 100k tokens, and at 240k in the two formats that hold so many."""
    found = {own.kv_dtype: own for path in FILES for own in rows_of(path) if own.metric == "needle"}
    assert found.keys() == {"fp8", "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128"}
    assert {own.value for own in found.values()} == {1.0}
    assert all("100k" in own.conditions for own in found.values())
    assert {name for name, own in found.items() if "240k" in own.conditions} == {
        "int4_per_token_head",
        "kvarn_k4v2_g128",
    }


def test_a_change_of_perplexity_says_that_it_is_of_another_model() -> None:
    changes = {own.kv_dtype: own for own in rows_of(QUALITY / "qwen3.8-27b.json") if "change" in own.metric}
    assert {name: own.value for name, own in changes.items()} == {
        "turboquant_k8v4": 1.17,
        "turboquant_4bit_nc": 2.71,
        "turboquant_k3v4_nc": 10.63,
        "turboquant_3bit_nc": 20.59,
    }
    assert all("another model" in own.conditions for own in changes.values())


@pytest.mark.parametrize("name", ["qwen3.8-27b", "qwen3.8-27b-fast", "qwen3.8-27b-int8-mlp"])
def test_variants_share_what_is_published_of_their_family(name: str) -> None:
    assert published_quality(load_model(name), "fp8") == published_quality(MODEL, "fp8")
    assert [own.value for own in published_quality(load_model(name), "fp8")] == [8.223, 8.235, 1.0]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3.8-flash-next"])
def test_of_a_model_that_nobody_measured_nothing_is_said(name: str) -> None:
    assert published_quality(load_model(name), "fp8") == ()


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "exl3_k4v4", "no format"])
def test_of_a_format_that_nobody_measured_nothing_is_said(fmt: str) -> None:
    assert published_quality(MODEL, fmt) == ()


@pytest.mark.parametrize("family", ["", "../quality/qwen3.8-27b", "/etc/passwd"])
def test_a_family_is_a_name_and_no_path(family: str) -> None:
    assert published_quality(replace(MODEL, family=family, name="a/b"), "fp8") == ()


def test_a_model_without_a_family_is_its_own() -> None:
    assert published_quality(replace(MODEL, family=""), "fp8") == published_quality(MODEL, "fp8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_qualities_is_of_a_model_and_of_formats_that_exist(path: Path) -> None:
    assert path.stem in {load_model(name).family or name for name in model_names()}
    for own in rows_of(path):
        assert own.kv_dtype in format_names()
        assert own.conditions
        assert own.source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "Expected `array`"),
        ('[{"kv_dtype": "fp8"}]', "missing required field `metric`"),
        (
            '[{"kv_dtype": "fp8", "metric": "taste", "value": 1, "conditions": "", "source": ""}]',
            r"\$\[0\]\.metric",
        ),
        (
            '[{"kv_dtype": "fp8", "metric": "needle", "value": -1, "conditions": "", "source": ""}]',
            r"\$\[0\]\.value",
        ),
    ],
)
def test_a_file_of_qualities_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    family = tmp_path.name  # what is read stays in memory under its family
    (tmp_path / f"{family}.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr("twin.answers.quality.QUALITY", tmp_path)
    with pytest.raises(BadFile, match=message):
        published_quality(replace(MODEL, family=family), "fp8")
