"""Speculative decoding: how many query tokens a verify step has, and how many tokens it yields.

Acceptance is an input: it belongs to the text, the drafter and the cache's format, not to the machine. Published values
lie in `twin/models/acceptance/<model>.json`.
"""

from typing import Annotated

from msgspec import Meta, Struct

from hwprofiles.spelling import match
from twin.errors import BadValue, Impossible
from twin.models.spec import Drafter, ModelSpec
from twin.models.store import ACCEPTANCE, published


class Accepted(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published acceptance: tokens a verify step yields on average, the bonus token included."""

    drafter: str
    tokens: Annotated[int, Meta(ge=1, le=64)]
    kv_dtype: str
    ctx_tokens: Annotated[int, Meta(ge=1)]
    task: str
    accepted: Annotated[float, Meta(ge=1, le=65)]
    source: str


class VerifyStep(Struct, frozen=True, kw_only=True):
    """One kind of step and how often it comes."""

    share: float
    query_tokens: int


class Speculation(Struct, frozen=True, kw_only=True):
    """A drafter, the tokens that it proposes, and the tokens that a step yields."""

    drafter: Drafter
    tokens: int  # proposed tokens, k
    accepted: float  # tokens that a step yields on average, from 1 (only the bonus token) to k + 1
    source: str  # where the acceptance comes from

    @property
    def steps(self) -> tuple[VerifyStep, ...]:
        """Kinds of verify step. A block drafter that may also look drafts up in the context has two.

        Its own draft is one block of `block_tokens` query tokens; a looked-up draft fills all k + 1. Which of them a
        step is shows in what it yields: the mean acceptance mixes the two (assumption A15).
        """
        drafter = self.drafter
        longest = self.tokens + 1
        if drafter.kind == "sequential" or longest <= drafter.block_tokens:
            return (VerifyStep(share=1.0, query_tokens=longest),)
        share = (self.accepted - drafter.block_accepts) / (drafter.lookup_accepts - drafter.block_accepts)
        share = min(1.0, max(0.0, share))
        both = ((1 - share, drafter.block_tokens), (share, longest))
        return tuple(VerifyStep(share=part, query_tokens=rows) for part, rows in both if part)

    @property
    def passes(self) -> int:
        """Passes of the drafter for one draft."""
        return self.tokens if self.drafter.kind == "sequential" else 1


def speculation_of(
    model: ModelSpec, text: str, *, accepted: float | None, task: str | None, kv_dtype: str, ctx_tokens: int
) -> Speculation:
    """The speculation that `text` (`<drafter>:<tokens>`) asks for. Raises BadValue or Impossible."""
    asked, colon, count = text.partition(":")
    if not model.drafters:
        raise Impossible(f"{model.name} has no drafter", hint="ask without --spec")
    drafters = {drafter.name: drafter for drafter in model.drafters}
    name = match(asked, drafters)
    if name is None:
        raise BadValue(f"{model.name} has no drafter {asked!r}", hint=f"it has {', '.join(sorted(drafters))}")
    drafter = drafters[name]
    if colon and (not count.isdecimal() or len(count) > 4):
        raise BadValue(f"{text!r} is not a speculation", hint="write mtp:3 or dflash2:15")
    tokens = int(count) if colon else drafter.default_tokens
    if not 1 <= tokens <= drafter.max_tokens:
        raise BadValue(f"{name} proposes 1 to {drafter.max_tokens} tokens, not {tokens}")
    if accepted is not None and task is not None:
        raise Impossible("an acceptance and a task were given; the task stands for a published acceptance")
    if accepted is None:
        family = model.family or model.name
        found = published_acceptance(family, name, tokens, kv_dtype=kv_dtype, ctx_tokens=ctx_tokens, task=task)
        accepted = found.accepted
        source = f"{found.task}, {found.kv_dtype}, {found.ctx_tokens:,} tokens: {found.source}"
    else:
        source = "given"
    if not 1 <= accepted <= tokens + 1:
        raise BadValue(f"accepted tokens {accepted:g} is outside the range of 1 to {tokens + 1} (k + 1) a step")
    return Speculation(drafter=drafter, tokens=tokens, accepted=accepted, source=source)


def published_acceptance(
    model: str, drafter: str, tokens: int, *, kv_dtype: str, ctx_tokens: int, task: str | None
) -> Accepted:
    """The published acceptance nearest to the question: of that task (`all` if none is named), format, then context."""
    rows: list[Accepted] = [row for row in published(ACCEPTANCE, model, Accepted) if row.drafter == drafter]
    tasks = sorted({row.task for row in rows})
    asked = "all" if task is None else task
    meant = match(asked, tasks)
    fitting = [row for row in rows if row.task == meant]
    if not fitting:
        hint = f"give --accept, or one of the tasks {', '.join(tasks) or '(none)'}"
        raise BadValue(f"no acceptance of {drafter} on task {asked!r} is published for {model}", hint=hint)

    def distance(row: Accepted) -> tuple[int, bool, int]:
        return abs(row.tokens - tokens), row.kv_dtype != kv_dtype, abs(row.ctx_tokens - ctx_tokens)

    return min(fitting, key=distance)
