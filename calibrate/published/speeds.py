"""Speeds that others published of whole steps on many machines, each as a question with the seconds that it took."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct
from msgspec.json import decode

from hwprofiles import HardwareProfile
from hwprofiles.store import RECORDS
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.errors import TwinError
from twin.operations.ops import Step
from twin.prediction import chunk_breakdown, decode_breakdown_of, prefill_breakdown

PUBLIC = RECORDS / "public"
MOST_ALIKE = 2
"""Sequences of a benchmark that decode the same tokens, from which on they choose fewer experts than others would."""
ENGINES = PUBLIC / "engines.json"

UNFUSED = "llama.cpp_unfused"  # what a row without flash attention ran on

Phase = Literal["decode", "prefill", "prefill_chunk"]


class Published(Struct, frozen=True, kw_only=True):
    """A row of engines.json as far as it is asked about; its other keys say where it is from."""

    id: str
    kind: Phase
    group: str
    depth: int
    tokens: int
    batch: int
    value: Annotated[float, Meta(gt=0)]
    ask: dict[str, object]
    flash_attention: bool | None = None


class SpeedRow(NamedTuple):
    """One published speed."""

    id: str
    curve: str  # rows of one model on one machine, from one source: what was measured together
    case: Case
    machine: HardwareProfile
    phase: Phase
    depth: int  # cached tokens before
    tokens: int  # new tokens of each sequence
    seconds: float

    @property
    def file(self) -> str:
        """Where it is kept."""
        return ENGINES.name

    @property
    def engine(self) -> str:
        """Whose kernels ran."""
        return self.case.rules.name

    @property
    def grain(self) -> float:
        """New tokens of a pass."""
        batch = self.case.question.batch
        return batch if self.phase == "decode" else min(self.tokens, self.case.chunk_tokens) * batch

    def breakdown(self, roofs: Roofs) -> Breakdown:
        """The same step as the twin has it. Raises MissingRate."""
        batch = self.case.question.batch
        if self.phase == "decode":  # the mean step of those that were timed
            return decode_breakdown_of(self.case, roofs, self.depth + self.tokens // 2, batch)
        if self.phase == "prefill" and not self.depth:
            return prefill_breakdown(self.case, roofs)
        whole = Breakdown()
        for first in range(0, self.tokens, self.case.chunk_tokens):
            q_tokens = min(self.case.chunk_tokens, self.tokens - first)
            whole.add(
                chunk_breakdown(self.case, Step(kv_tokens=self.depth + first, q_tokens=q_tokens, batch=batch), roofs)
            )
        return whole


@cache
def speed_rows(path: Path = ENGINES) -> tuple[SpeedRow, ...]:
    """All rows of a file that can be asked. Raises BadFile."""
    return tuple(_asked(decode(path.read_bytes(), type=tuple[Published, ...])))


def _asked(rows: tuple[Published, ...]) -> Iterator[SpeedRow]:
    for row in rows:
        ask = {key: value for key, value in row.ask.items() if key in Question.__struct_fields__}
        if row.flash_attention is False:
            ask["backend"] = UNFUSED
        model = str(ask["model"])
        ask["model"] = str(PUBLIC / model) if model.startswith("models/") else model
        try:
            case, machine = settled(Question(**ask), None)  # type: ignore[arg-type]
        except TwinError:
            continue  # an engine or a format that no rulebook has
        if row.batch > MOST_ALIKE and _chooses(case):
            continue
        seconds = (row.batch if row.kind == "decode" else row.tokens * row.batch) / row.value
        curve = f"{row.group} {machine.name} {case.model.name} {ask.get('weights')}"
        yield SpeedRow(row.id, curve, case, machine, row.kind, row.depth, row.tokens, seconds)


def _chooses(case: Case) -> bool:
    """Whether tokens choose among experts."""
    feeds = (layer.feed_forward for layer in case.model.kinds.values())
    return any(feed is not None and feed.experts > feed.active for feed in feeds)
