"""One question over all layouts or all formats of its engine: what the choice buys and costs.

What is published about a format's effect on answers is carried beside its prediction, never predicted or mixed in.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.errors import Impossible
from twin.formats import kv_format
from twin.models import ModelSpec
from twin.models.store import QUALITY, published
from twin.prediction import Prediction, predict

MANY_FORMATS = 12  # an engine with more formats is shown by those with as many bits for K as for V


class Quality(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published figure of one format."""

    kv_dtype: str
    metric: Literal["perplexity", "perplexity_change_percent", "needle"]
    value: Annotated[float, Meta(ge=0)]  # perplexity, its change against 16 bits in per cent, or 1 for a found needle
    conditions: str
    source: str


def published_quality(model: ModelSpec, kv_dtype: str) -> tuple[Quality, ...]:
    """All that is published of that format for the model's family; empty where nothing is."""
    return tuple(row for row in published(QUALITY, model.family or model.name, Quality) if row.kv_dtype == kv_dtype)


class Comparison(Struct, frozen=True, kw_only=True):
    """Predictions of one question, and the choices that are refused."""

    over: str  # `layouts` or `formats`
    predictions: tuple[Prediction, ...]
    refused: dict[str, str]  # why a choice cannot be asked for, by its name

    def quality(self, prediction: Prediction) -> tuple[Quality, ...]:
        """What is published about the answers of that format: carried, not predicted."""
        return published_quality(prediction.case.model, prediction.case.fmt.name)


def compare_all(question: Question, *, over: str | None = None, formats: Sequence[str] | None = None) -> Comparison:
    """Predict every layout, or every format, of the question's engine; a refusal is raised if all are refused."""
    case = resolve(replace(question, kv_dtype=None, backend=None))
    rules, one_layout = case.rules, question.layout is not None or len(case.rules.layouts) == 1
    kind = over or ("formats" if one_layout or formats else "layouts")
    if kind == "layouts" and formats:
        raise Impossible("--formats goes with --over formats")
    if kind == "layouts" and question.layout is not None:
        raise Impossible("--layout goes with --over formats", hint="--over layouts shows all of them")
    if kind == "formats" and question.kv_dtype is not None:
        raise Impossible("--kv-dtype means nothing where formats are compared", hint="name them with --formats")
    field, names = ("layout", rules.layouts) if kind == "layouts" else ("kv_dtype", _formats(case, formats))
    predictions: list[Prediction] = []
    refused: dict[str, Impossible] = {}
    for name in names:
        try:
            predictions.append(predict(replace(question, **{field: name})))
        except Impossible as wrong:
            refused[name] = wrong
    if not predictions:
        raise next(iter(refused.values()))
    return Comparison(
        over=kind, predictions=tuple(predictions), refused={name: wrong.message for name, wrong in refused.items()}
    )


def _formats(case: Case, asked: Sequence[str] | None) -> tuple[str, ...]:
    if asked:
        return tuple(dict.fromkeys(kv_format(name.strip()).name for name in asked))
    kept = case.rules.formats_of(case.layout.name)
    if len(kept) <= MANY_FORMATS:
        return kept
    return tuple(name for name in kept if kv_format(name).key.bits == kv_format(name).value.bits)
