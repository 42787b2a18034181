"""From a question and a workload to a served day: the case's steps and pool under a continuous-batching scheduler."""

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

from msgspec import Struct

from hwprofiles import HardwareProfile
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.assumptions import beyond_native, of_another_version
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.errors import Impossible
from twin.memory.block_pool import KVPool
from twin.memory.plan import MemoryPlan, plan_memory
from twin.operations.lower import (
    backbone_program,
    draft_prefill_program,
    head_program,
    last_device,
    prefill_attention_program,
)
from twin.operations.ops import Step
from twin.prediction import Z90, chunk_breakdown, decode_breakdown_of, refuse_borrowed
from twin.serving.engine import StepCosts, simulate_serving
from twin.serving.metrics import ServingResult
from twin.serving.requests import Limits, Request

FAR = 4096  # cached tokens a sequence over which the slope is taken; any number gives the same

FAR_IN_THREAD_BLOCKS = 2**17
"""The same where thread blocks of attention are counted: they fill a device by steps, which long contexts even out."""

Requests = Callable[[], Iterable[Request]]  # gives the workload from its start, as often as it is asked


class Service(Struct, frozen=True, kw_only=True):
    """A workload as it is served, and the same with every rate at the far end of its interval."""

    case: Case
    machine: HardwareProfile
    memory: MemoryPlan
    kv_pool: KVPool
    result: ServingResult
    fast: ServingResult | None  # steps as short as the 90 % interval allows; None: not asked for, or nothing served
    slow: ServingResult | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said beside the answer: that requests may be longer than the model takes by itself."""
        return of_another_version(self.case) + beyond_native(self.case, self.result.limits.max_model_tokens or 0)

    def ends(self, figure: Callable[[ServingResult], float]) -> tuple[float, float]:
        """The 90 % interval of a figure of the result, low end first; the value itself where none was asked for."""
        if self.fast is None or self.slow is None:
            return figure(self.result), figure(self.result)
        low, _, high = sorted((figure(self.fast), figure(self.result), figure(self.slow)))
        return low, high


def serve(
    question: Question,
    requests: Requests,
    *,
    profile: HardwareProfile | None = None,
    intervals: bool = True,
    watch: dict[str, Any] | None = None,
) -> Service:
    """Serve `requests` on the case that `question` describes; its context is the longest request to expect.

    `watch` are callbacks of `simulate_serving`, which see the plain run only. A pool without a block is an answer: all
    requests are rejected. Raises as `predict` does, and what reading a workload raises.
    """
    case, machine = settled(question, profile)
    plan = plan_memory(case, machine)
    if plan.kv_pool is None:
        hint = "serving is modelled for engines that do, such as vllm"
        raise Impossible(f"{case.rules.name} shares no pool of blocks among requests", hint=hint)
    known, speculation = plan.kv_pool.limits, case.speculation
    limits = Limits(
        batched_tokens=known.batched_tokens,
        max_sequences=known.max_sequences,
        max_model_tokens=question.max_model_tokens or question.ctx_tokens,
        speculative=speculation.tokens if speculation else 0,
        tokens_per_step=speculation.accepted if speculation else 1.0,
        prefix_cache=question.prefix_caching,
    )
    roofs = Roofs(machine, strict=False)
    costs, pool = CaseCosts(case, roofs), CasePool(plan.kv_pool)
    result = simulate_serving(requests(), costs, pool, limits, **(watch or {}))
    if question.strict:
        refuse_borrowed(roofs)
    fast = slow = None
    if intervals and result.steps:
        factor = math.exp(Z90 * _spread(case, roofs, result))
        fast, slow = (simulate_serving(requests(), costs.scaled(scale), pool, limits) for scale in (1 / factor, factor))
    return Service(case=case, machine=machine, memory=plan, kv_pool=plan.kv_pool, result=result, fast=fast, slow=slow)


def _spread(case: Case, roofs: Roofs, result: ServingResult) -> float:
    """Relative standard deviation of a step's time: the larger of a mean decode step's and a mean chunk's (A17)."""
    running = max(1, round(result.resident_mean))
    past = max(1, result.prompt_tokens // max(1, result.completed))
    decode = decode_breakdown_of(case, roofs, past, running)
    chunk = chunk_breakdown(case, Step(kv_tokens=0, q_tokens=min(past, case.chunk_tokens)), roofs)
    return max(breakdown.spread_s(roofs) / breakdown.seconds for breakdown in (decode, chunk))


class CaseCosts(StepCosts):
    """Seconds of the steps of one case on one machine, from the same ops and rates as a single prediction.

    A step is the weights' products over all its tokens, the recurrent states, the decodes' attention and each prefill
    chunk's own. Decodes' attention reads every cached token once, so a step's time is affine in the tokens cached.
    Windows are taken as full, whatever the context, as a drafter's is in memory. Parts of a step are looked up once.
    """

    def __init__(self, case: Case, roofs: Roofs) -> None:
        if case.model.indexer is not None:
            raise Impossible(f"serving is modelled for attention that reads its whole cache, not for {case.model.name}")
        self.case, self.roofs = case, roofs
        self.devices = roofs.profile.stages(case.tp)
        self._factor = 1.0
        self._decodes: dict[int, tuple[float, float]] = {}
        self._backbones: dict[tuple[int, int, int], float] = {}

    def scaled(self, factor: float) -> "CaseCosts":
        """The same with every second `factor` as long; what is looked up serves both."""
        other = copy(self)
        other._factor = factor
        return other

    def decode(self, sequences: int, ctx_tokens: float) -> tuple[float, float]:
        """Seconds of a step that decodes `sequences` over `ctx_tokens` cached tokens in all, and per token more."""
        base_s, token_s = self._decode(sequences)
        return (base_s + token_s * ctx_tokens) * self._factor, token_s * self._factor

    def mixed(self, sequences: int, ctx_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of the same step with prefill chunks (kv_tokens, q_tokens) beside it."""
        decoded = sequences * (self.case.speculation.tokens + 1 if self.case.speculation else 1)
        tokens = decoded + sum(q_tokens for _, q_tokens in chunks)
        seconds = self._backbone(tokens, sequences + len(chunks), decoded + len(chunks))
        if sequences:
            base_s, token_s = self._decode(sequences)
            alone_s = self._backbone(decoded, sequences, decoded)
            seconds += base_s - alone_s + token_s * ctx_tokens
        return (seconds + sum(self._chunk(*chunk) for chunk in chunks)) * self._factor

    def _decode(self, sequences: int) -> tuple[float, float]:
        if sequences not in self._decodes:
            windows = [mixer.reach for mixer in self.case.model.caches]
            near = max(0, *windows, self.case.speculation.drafter.window if self.case.speculation else 0)
            far = FAR_IN_THREAD_BLOCKS if self.case.rules.own_kernels.decode_plans else FAR
            near_s, far_s = (
                decode_breakdown_of(self.case, self.roofs, past, sequences).seconds for past in (near, near + far)
            )
            slope_s = (far_s - near_s) / far
            self._decodes[sequences] = near_s - slope_s * near, slope_s / sequences
        return self._decodes[sequences]

    def _backbone(self, tokens: int, sequences: int, logits: int) -> float:
        key = tokens, sequences, logits
        if key not in self._backbones:
            program = backbone_program(self.case, tokens, sequences, self.devices)
            program += head_program(self.case, logits, self.devices)
            self._backbones[key] = Breakdown().run(program, self.roofs).seconds
        return self._backbones[key]

    def _chunk(self, kv_tokens: int, q_tokens: int) -> float:
        chunk = Step(kv_tokens=kv_tokens, q_tokens=q_tokens)
        program = prefill_attention_program(self.case, chunk, self.devices)
        if self.case.speculation is not None:
            program += draft_prefill_program(self.case, self.case.speculation, chunk, last_device(self.devices))
        return Breakdown().run(program, self.roofs).seconds


class CasePool:
    """The pool of a plan as the scheduler sees it, without what is nobody's."""

    def __init__(self, kv_pool: KVPool) -> None:
        self.blocks = max(0, kv_pool.blocks - kv_pool.null_blocks)
        self._plan = kv_pool.plan
        self._growing = kv_pool.plan.growing_blocks
        self._block_tokens = kv_pool.plan.block_tokens
        growing = [group for group in kv_pool.plan.groups if group.kind != "recurrent"]
        self._even = all((group.kind, group.block_tokens) == ("attention", self._block_tokens) for group in growing)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence with so many cached tokens holds; with none, those of its recurrent states."""
        if self._even:  # asked often
            return self._plan.state_blocks + self._growing * -(-tokens // self._block_tokens)
        return self._plan.blocks_per_request(tokens) if tokens else self._plan.state_blocks
