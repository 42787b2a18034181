"""A comparison is one prediction a choice, with what is published of its answers; refusals are kept, not raised."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.published.cases import Row, read_published
from twin.answers.comparison import MANY_FORMATS, QUALITY, Comparison, Quality, compare_all, published_quality
from twin.ask.question import Question
from twin.engines import load_engine
from twin.errors import Impossible
from twin.formats import format_names, kv_format
from twin.models import load_model, model_names

FLASH = Question(ctx_tokens=1 << 18)
DENSE = Question(ctx_tokens=100_000, model="qwen3.8-27b")


def names(compared: Comparison) -> list[str]:
    return [each.case.fmt.name for each in compared.predictions]


def test_of_many_formats_those_with_as_many_bits_for_k_as_for_v_stand_for_all() -> None:
    assert len(load_engine("exllamav3").formats) > MANY_FORMATS
    shown = names(compare_all(Question(ctx_tokens=4096, layout="vram")))
    assert shown[0] == "fp16"
    assert all(kv_format(name).key.bits == kv_format(name).value.bits for name in shown)
    assert len(shown) <= MANY_FORMATS


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"formats": ["fp8", "bf16"]}, "keeps no fp8 cache under offload"),  # the first of two reasons
        ({"over": "layouts", "formats": ["fp16"]}, "--formats goes with --over formats"),
        ({"over": "layouts", "layout": "vram"}, "--layout goes with --over formats"),
        ({"over": "formats", "kv_dtype": "fp16"}, "--kv-dtype means nothing where formats are compared"),
    ],
)
def test_what_cannot_be_compared_is_refused(asked: Any, says: str) -> None:
    question = replace(FLASH, layout=asked.get("layout"), kv_dtype=asked.get("kv_dtype"))
    with pytest.raises(Impossible, match=says):
        compare_all(question, over=asked.get("over"), formats=asked.get("formats"))


QWEN = load_model("qwen3.8-27b")
FILES = sorted(QUALITY.glob("*.json"))
PUBLISHED = [row for row in read_published("published_rtx3090.json").rows if row.metric == "perplexity"]


def rows_of(path: Path) -> list[Quality]:
    return msgspec.json.decode(path.read_bytes(), type=list[Quality])


@pytest.mark.parametrize("row", PUBLISHED, ids=[row.id for row in PUBLISHED])
def test_every_published_perplexity_is_carried_as_it_was_published(row: Row) -> None:
    conditions = "utilisation 0.93" if row.conditions.get("util") == 0.93 else "batch defaults"
    carried = published_quality(QWEN, str(row.conditions["layout"]))
    found = [own.value for own in carried if own.metric == "perplexity" and conditions in own.conditions]
    assert found == [row.value]


def test_needles_were_found_in_every_format_that_a_table_gives_them_for() -> None:
    """At 100k tokens, and at 240k in the two formats that hold so many."""
    found = {own.kv_dtype: own for path in FILES for own in rows_of(path) if own.metric == "needle"}
    assert found.keys() == {"fp8", "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128"}
    assert {own.value for own in found.values()} == {1.0}
    assert all("100k" in own.conditions for own in found.values())
    far = {name for name, own in found.items() if "240k" in own.conditions}
    assert far == {"int4_per_token_head", "kvarn_k4v2_g128"}


@pytest.mark.parametrize("family", ["", "../quality/qwen3.8-27b", "/etc/passwd"])
def test_a_family_is_a_name_and_no_path(family: str) -> None:
    assert published_quality(replace(QWEN, family=family, name="a/b"), "fp8") == ()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_qualities_is_of_a_model_and_of_formats_that_exist(path: Path) -> None:
    assert path.stem in {load_model(name).family or name for name in model_names()}
    for own in rows_of(path):
        assert own.kv_dtype in format_names()
        assert own.conditions
        assert own.source
