"""Speeds that others published of whole steps on many machines, each as a question with the seconds that it took."""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct
from msgspec.json import decode

from calibrate.published.public_cases import load_public, question_of
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
OUTDATED = ("gpubench", "pr4766", "pr7676")
"""Of builds before mid 2024: on devices with CUDA their steps took up to half as long again, without graphs, and their
prompts met quantised weights in 16 bits."""
MOST_ALIKE = 2
"""Sequences of a benchmark that decode the same tokens, from which on they choose fewer experts than others would."""
SERVING = PUBLIC / "serving.json"
MOST_BESIDE = 0.05
"""Share of a served token's time that prompts of others took beside it, up to which the rest is taken for its step."""
MOST_SERVED = 8  # sequences of a served step: of more, prompts come too often
ENGINES = PUBLIC / "engines.json"
SETTING = (
    "exl3-100-6-1-2k-decode", "exl3-100-6-1-2k-prefill", "exl3-100-6-1-32k-decode", "exl3-100noqc-6-1-32k-prefill",
)  # fmt: skip
"""Rows of the public ones that set a rate."""

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
    confidence: str = "high"


class Served(Struct, frozen=True, kw_only=True):
    """A row of serving.json: so many requests at a time, alike."""

    id: str
    depth: int  # prompt
    tokens: int  # output
    batch: int
    tpot_ms: float
    ttft_ms: float
    ask: dict[str, object]

    @property
    def beside_s(self) -> float:
        """Of each output token, what prompts of the other requests take: each once in every request's output."""
        return (self.batch - 1) * self.ttft_ms / 1e3 / self.tokens


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
    file: str  # where it is kept; of the public rows its own id

    @property
    def named(self) -> str:
        """What a rate that it sets says of it."""
        return self.file if self.file == self.id else f"{self.file} {self.machine.device_name}"

    @property
    def served(self) -> bool:
        """Whether it is of a served workload: kernels are not set by it, only what the host takes beside them."""
        return self.file == SERVING.name

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
def speed_rows() -> tuple[SpeedRow, ...]:
    """All rows that can be asked: of benchmarks of one step, and of served steps of few sequences."""
    benchmarks = decode(ENGINES.read_bytes(), type=tuple[Published, ...])
    served = decode(SERVING.read_bytes(), type=tuple[Served, ...])
    return (*_asked(benchmarks), *_steps(served), *_of_public())


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
        if row.confidence == "low" or (row.batch > MOST_ALIKE and chooses(case)):
            continue
        if row.group in OUTDATED and machine.gpu.runs_cuda:
            continue
        seconds = (row.batch if row.kind == "decode" else row.tokens * row.batch) / row.value
        curve = f"{row.group} {machine.name} {case.model.name} {ask.get('weights')}"
        yield SpeedRow(row.id, curve, case, machine, row.kind, row.depth, row.tokens, seconds, ENGINES.name)


def _steps(rows: tuple[Served, ...]) -> Iterator[SpeedRow]:
    """The decode step behind each served row that others' prompts hardly touch."""
    for row in rows:
        step_s = row.tpot_ms / 1e3 - row.beside_s
        if row.batch > MOST_SERVED or row.beside_s > MOST_BESIDE * step_s:
            continue
        ask = {key: value for key, value in row.ask.items() if key in Question.__struct_fields__}
        try:
            case, machine = settled(Question(**ask), None)  # type: ignore[arg-type]
        except TwinError:
            continue
        curve = f"serving {machine.name} {case.model.name}"
        yield SpeedRow(row.id, curve, case, machine, "decode", row.depth, row.tokens, step_s, SERVING.name)


def _of_public() -> Iterator[SpeedRow]:
    """The few of the judged public rows that set a rate: of an engine of which nothing else is known."""
    public = load_public()
    values = {row.id: row.value for row in public.rows}
    for name in SETTING:
        case, value = public.cases[name], values[name]
        if not value:
            raise ValueError(f"row {name!r} sets a rate and has no value")
        asked, machine = settled(question_of(case.ask), None)
        ctx_tokens = asked.question.ctx_tokens
        if case.figure == "decode":
            yield SpeedRow(name, case.curve, asked, machine, "decode", ctx_tokens, 1, 1 / value, name)
        else:
            yield SpeedRow(name, case.curve, asked, machine, "prefill", 0, ctx_tokens, ctx_tokens / value, name)


def chooses(case: Case) -> bool:
    """Whether tokens choose among experts."""
    feeds = (layer.feed_forward for layer in case.model.kinds.values())
    return any(feed is not None and feed.experts > feed.active for feed in feeds)
