"""A comparison is one prediction a choice; what cannot be asked for is kept with its reason, not raised."""

import pytest

from twin.answers.comparison import MANY_FORMATS, Comparison, compare_all
from twin.ask.question import Question
from twin.engines import load_engine
from twin.errors import Impossible, UnknownName
from twin.formats import kv_format
from twin.prediction import predict

FLASH = Question(ctx_tokens=1 << 18)
DENSE = Question(ctx_tokens=100_000, model="qwen3.8-27b")


def names(compared: Comparison) -> list[str]:
    """The choice that each prediction stands for."""
    cases = [each.case for each in compared.predictions]
    return [case.layout.name if compared.over == "layouts" else case.fmt.name for case in cases]


def test_layouts_of_the_engine_are_compared_unless_it_has_one() -> None:
    compared = compare_all(FLASH)
    assert compared.over == "layouts"
    assert names(compared) == list(load_engine("exllamav3").layouts)
    assert compare_all(DENSE).over == "formats"


def test_naming_a_layout_or_formats_compares_formats() -> None:
    under_vram = compare_all(Question(ctx_tokens=4096, layout="vram"))
    assert under_vram.over == "formats"
    assert {each.case.layout.name for each in under_vram.predictions} == {"vram"}
    assert compare_all(FLASH, formats=["fp16"]).over == "formats"


def test_every_choice_is_the_prediction_of_its_question() -> None:
    for each in compare_all(FLASH).predictions:
        assert each.decode == predict(Question(ctx_tokens=1 << 18, layout=each.case.layout.name)).decode


def test_all_formats_of_an_engine_are_there_or_refused() -> None:
    compared = compare_all(DENSE)
    assert {*names(compared), *compared.refused} == set(load_engine("vllm").formats)
    assert "does not start on rtx3090" in compared.refused["fp8_per_token_head"]


def test_of_many_formats_those_with_as_many_bits_for_k_as_for_v_stand_for_all() -> None:
    assert len(load_engine("exllamav3").formats) > MANY_FORMATS
    shown = names(compare_all(Question(ctx_tokens=4096, layout="vram")))
    assert shown[0] == "fp16"
    assert all(kv_format(name).key.bits == kv_format(name).value.bits for name in shown)
    assert len(shown) <= MANY_FORMATS


def test_formats_are_compared_in_the_order_of_their_first_naming() -> None:
    assert names(compare_all(DENSE, formats=[" int8_per_token_head", "fp8", "fp8 "])) == ["int8_per_token_head", "fp8"]


def test_a_rate_that_is_missing_leaves_its_choice_without_a_speed_only() -> None:
    compared = compare_all(DENSE, formats=["fp8", "turboquant_3bit_nc"])
    known, unknown = compared.predictions
    assert known.decode is not None
    assert unknown.decode is None
    assert unknown.missing
    assert unknown.memory.max_ctx_tokens() > 0


def test_what_does_not_fit_is_a_choice_like_any_other() -> None:
    compared = compare_all(DENSE, formats=["bf16", "fp8"])
    assert [each.fits for each in compared.predictions] == [False, True]


def test_quality_belongs_to_the_family_of_the_model_and_to_the_format() -> None:
    compared = compare_all(Question(ctx_tokens=4096, model="qwen3.8-27b-fast"), formats=["fp8", "bf16"])
    fp8, bf16 = (compared.quality(each) for each in compared.predictions)
    assert {row.kv_dtype for row in fp8} == {"fp8"}
    assert all(row.source and row.conditions for row in fp8)
    assert not bf16


def test_a_what_if_compares_a_format_that_the_engine_does_not_keep() -> None:
    both = ["fp16", "int4_per_token_head"]
    plain = compare_all(FLASH, formats=both)
    assert list(plain.refused) == ["int4_per_token_head"]
    asked = compare_all(Question(ctx_tokens=1 << 18, what_if=True), formats=both)
    assert names(asked) == both
    assert asked.predictions[1].memory.max_ctx_tokens() > asked.predictions[0].memory.max_ctx_tokens()


def test_where_no_choice_can_be_asked_for_the_first_reason_is_raised() -> None:
    with pytest.raises(Impossible, match="keeps no fp8 cache under offload"):
        compare_all(FLASH, formats=["fp8", "bf16"])


@pytest.mark.parametrize(
    ("question", "more", "says"),
    [
        (FLASH, {"over": "layouts", "formats": ["fp16"]}, "--formats goes with --over formats"),
        (Question(ctx_tokens=1, layout="vram"), {"over": "layouts"}, "--layout goes with --over formats"),
        (Question(ctx_tokens=1, model="qwen3.8-27b", kv_dtype="fp8"), {}, "--kv-dtype means nothing"),
        (Question(ctx_tokens=1, kv_dtype="fp16"), {"over": "formats"}, "--kv-dtype means nothing"),
    ],
)
def test_options_that_contradict_the_comparison_are_refused(
    question: Question, more: dict[str, object], says: str
) -> None:
    with pytest.raises(Impossible, match=says):
        compare_all(question, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("formats", [[""], ["fp8", "fp17"]])
def test_an_unknown_format_is_no_choice_to_be_listed_as_refused(formats: list[str]) -> None:
    with pytest.raises(UnknownName):
        compare_all(DENSE, formats=formats)
