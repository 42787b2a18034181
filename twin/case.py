"""A Question is what a person asks, by name; a Case is the same with names resolved and defaults filled in."""

from typing import Literal

from msgspec import Struct

from hwprofiles.profile import FULL_LANES
from twin.counts import index_key_bytes
from twin.engines import EngineRules, load_engine
from twin.errors import BadValue, Impossible
from twin.formats import KVFormat, kv_format
from twin.layouts import CacheLayout, load_layout
from twin.models import ModelSpec, load_model
from twin.units import MAX_TOKENS

Prefill = Literal["auto", "staged", "naive"]
Copies = Literal["serial", "overlapped"]
Tier = Literal["vram", "host"]
Ngram = Literal["ram", "disk"]
HostPages = Literal["huge", "4KiB"]

MAX_BATCH = 4096
LANES = (16, 8, 4)


class Question(Struct, frozen=True, kw_only=True):
    """What is asked. None means: as the engine does by default."""

    ctx_tokens: int
    """Tokens in the cache when the predicted decode step begins, and length of the prompt in prefill."""
    model: str = "qwen3.8-flash-next"
    hw: str = "3x-rtx3090"
    engine: str = "exllamav3"
    layout: str = "offload"
    kv_dtype: str | None = None
    batch: int = 1
    chunk_tokens: int | None = None
    staging_bytes: int | None = None
    prefill: Prefill | None = None
    copies: Copies | None = None
    pooled: Tier | None = None
    ngram: Ngram | None = None
    host_pages: HostPages | None = None
    lanes: int = FULL_LANES


class Case(Struct, frozen=True, kw_only=True):
    """A question with its parts. Knows nothing of hardware."""

    question: Question
    model: ModelSpec
    rules: EngineRules
    fmt: KVFormat
    layout: CacheLayout
    chunk_tokens: int
    staging_bytes: int
    prefill: Prefill
    copies: Copies
    pooled: Tier
    ngram: Ngram
    huge_pages: bool

    @property
    def index_key_bytes(self) -> int:
        """One raw or pooled indexer key in one attention layer."""
        follows = self.rules.index_element_bytes is None
        element = self.fmt.bits // 8 if follows else self.rules.index_element_bytes or 0
        return index_key_bytes(self.model, element)

    @property
    def plane_bytes(self) -> int:
        """K and V of one token in one attention layer."""
        attention = self.model.attention
        return self.fmt.plane_bytes(kv_heads=attention.kv_heads, head_dim=attention.head_dim)


def resolve(question: Question) -> Case:
    """Look every name up and check every number. Raises UnknownName, BadValue or Impossible."""
    _check_numbers(question)
    rules = load_engine(question.engine)
    layout = load_layout(question.layout)
    _check_options(question, layout)
    if layout.name not in rules.layouts:
        raise Impossible(f"{rules.name} has no layout {layout.name!r}", hint=f"it has {', '.join(rules.layouts)}")
    fmt = kv_format(rules.formats[0] if question.kv_dtype is None else question.kv_dtype)
    if fmt.name not in rules.formats:
        raise Impossible(f"{rules.name} keeps no {fmt.name} cache", hint=f"it keeps {', '.join(rules.formats)}")
    model = load_model(question.model)
    if layout.name == "offload" and model.indexer is None:
        raise Impossible(f"{model.name} reads its whole cache at every step: offload needs sparse attention")
    case = Case(
        question=question,
        model=model,
        rules=rules,
        fmt=fmt,
        layout=layout,
        chunk_tokens=question.chunk_tokens or rules.chunk_tokens,
        staging_bytes=rules.staging_bytes if question.staging_bytes is None else question.staging_bytes,
        prefill=question.prefill or "auto",
        copies=question.copies or ("overlapped" if rules.overlaps_copies else "serial"),
        pooled=question.pooled or "vram",
        ngram=question.ngram or ("ram" if rules.ngram == "ram" else "disk"),
        huge_pages=(question.host_pages or "huge") == "huge",
    )
    _check_case(case)
    return case


def _check_numbers(question: Question) -> None:
    _in_range("context", question.ctx_tokens, 1, MAX_TOKENS, "tokens")
    _in_range("batch", question.batch, 1, MAX_BATCH, "sequences")
    if question.chunk_tokens is not None:
        _in_range("chunk", question.chunk_tokens, 1, MAX_TOKENS, "tokens")
    if not isinstance(question.lanes, int) or question.lanes not in LANES:
        raise BadValue(f"{question.lanes} PCIe lanes", hint=f"one of {', '.join(map(str, LANES))}")
    for name, value, known in (
        ("prefill", question.prefill, ("auto", "staged", "naive")),
        ("copies", question.copies, ("serial", "overlapped")),
        ("pooled", question.pooled, ("vram", "host")),
        ("ngram", question.ngram, ("ram", "disk")),
        ("host pages", question.host_pages, ("huge", "4KiB")),
    ):
        if value is not None and value not in known:
            raise BadValue(f"{name} {value!r} is not known", hint=f"one of {', '.join(known)}")


def _in_range(what: str, value: int, low: int, high: int, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadValue(f"{what} {value} is outside the range of {low:,} to {high:,} {unit}")


def _check_options(question: Question, layout: CacheLayout) -> None:
    special = {
        "staging_bytes": "--staging",
        "prefill": "--prefill",
        "copies": "--copies",
        "pooled": "--pooled",
        "host_pages": "--host-pages",
    }
    for field, flag in special.items():
        if getattr(question, field) is not None and field not in layout.options:
            raise Impossible(f"{flag} means nothing under layout {layout.name!r}: its planes never cross the link")


def _check_case(case: Case) -> None:
    page = case.rules.page_tokens
    if case.chunk_tokens % page:
        raise BadValue(f"chunk of {case.chunk_tokens:,} tokens is not a multiple of {case.rules.name}'s page of {page}")
    if case.question.staging_bytes is not None:
        least = page * case.plane_bytes
        if case.staging_bytes < least:
            raise BadValue(
                f"staging of {case.staging_bytes:,} B is below the smallest of {least:,} B",
                hint=f"one page of {page} tokens with K and V",
            )
    if case.question.ngram is not None and case.model.ngram is None:
        raise Impossible(f"{case.model.name} has no n-gram table")
    if case.prefill == "staged" and case.question.batch != 1:
        raise Impossible(f"{case.rules.name} stages a prefill only for one sequence at a time")
