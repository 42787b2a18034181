"""From a question and a workload to a served day: the case's steps and pool under a continuous-batching scheduler."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from hwprofiles import HardwareProfile
from twin.answers.step_costs import CaseCosts, CasePool
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import machine_of, resolve
from twin.assumptions import beyond_native
from twin.cost.roofline import Roofs
from twin.errors import Impossible
from twin.memory.block_pool import KVPool, pool_rules
from twin.memory.plan import MemoryPlan, plan_memory
from twin.operations.ops import Step
from twin.prediction import Z90, chunk_breakdown, decode_breakdown_of
from twin.serving.limits import Limits
from twin.serving.protocols import StepCosts
from twin.serving.records import ServingResult
from twin.serving.requests import Request
from twin.serving.run import simulate_serving

Requests = Callable[[], Iterable[Request]]
"""Gives the workload from its start, as often as it is asked."""


class Service(Struct, frozen=True, kw_only=True):
    """A workload as it is served, and the same with every rate at the far end of its interval."""

    case: Case
    machine: HardwareProfile
    memory: MemoryPlan
    kv_pool: KVPool
    limits: Limits
    result: ServingResult
    fast: ServingResult | None
    """Steps as short as the 90 % interval allows; None where intervals were not asked for, or nothing was served."""
    slow: ServingResult | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said beside the answer: that requests may be longer than the model takes by itself."""
        return beyond_native(self.case, self.limits.max_model_tokens or 0)

    def ends(self, figure: Callable[[ServingResult], float]) -> tuple[float, float]:
        """The 90 % interval of a figure of the result, low end first; the value itself where none was asked for."""
        if self.fast is None or self.slow is None:
            return figure(self.result), figure(self.result)
        low, _, high = sorted((figure(self.fast), figure(self.result), figure(self.slow)))
        return low, high


class _Scaled(StepCosts):
    """Costs whose every second is `factor` as long."""

    def __init__(self, costs: StepCosts, factor: float) -> None:
        self.costs, self.factor = costs, factor

    def decode(self, sequences: int, ctx_tokens: int) -> tuple[float, float]:
        seconds, token_s = self.costs.decode(sequences, ctx_tokens)
        return seconds * self.factor, token_s * self.factor

    def mixed(self, sequences: int, ctx_tokens: int, chunks: Any) -> float:
        return self.costs.mixed(sequences, ctx_tokens, chunks) * self.factor


def serve(
    question: Question,
    requests: Requests,
    *,
    profile: HardwareProfile | None = None,
    intervals: bool = True,
    limits: dict[str, Any] | None = None,
    watch: dict[str, Any] | None = None,
) -> Service:
    """Serve `requests` on the case that `question` describes; its context is the longest request to expect.

    `limits` are the scheduler's own options beside those of the question, `watch` the callbacks of `simulate_serving`,
    which see the plain run only. A pool without a block is an answer: all requests are rejected. Raises as `predict`
    does, and what reading a workload raises.
    """
    case = resolve(question)
    machine = machine_of(case, profile)
    plan = plan_memory(case, machine)
    if plan.kv_pool is None:
        raise Impossible(
            f"{case.rules.name} shares no pool of blocks among requests",
            hint="serving is modelled for engines that do, such as vllm",
        )
    rules = pool_rules(case)
    speculation = case.speculation
    bounds = Limits(
        batched_tokens=question.chunk_tokens or rules.batched_tokens,
        max_sequences=question.max_sequences or rules.max_sequences,
        max_model_tokens=question.max_model_tokens or question.ctx_tokens,
        speculative=speculation.tokens if speculation else 0,
        tokens_per_step=speculation.accepted if speculation else 1.0,
        prefix_cache=question.prefix_caching,
        **(limits or {}),
    )
    roofs = Roofs(machine)
    costs, pool = CaseCosts(case, roofs), CasePool(plan.kv_pool)
    result = simulate_serving(requests(), costs, pool, bounds, **(watch or {}))
    fast = slow = None
    if intervals and result.steps:
        factor = math.exp(Z90 * _spread(case, roofs, result))
        fast, slow = (
            simulate_serving(requests(), _Scaled(costs, scale), pool, bounds) for scale in (1 / factor, factor)
        )
    return Service(
        case=case,
        machine=machine,
        memory=plan,
        kv_pool=plan.kv_pool,
        limits=bounds,
        result=result,
        fast=fast,
        slow=slow,
    )


def _spread(case: Case, roofs: Roofs, result: ServingResult) -> float:
    """Relative standard deviation of a step's time: the larger of a mean decode step's and a mean chunk's (A17)."""
    running = max(1, round(result.resident_mean))
    past = max(1, result.prompt_tokens // max(1, result.completed))
    decode = decode_breakdown_of(case, roofs, past, running)
    chunk = chunk_breakdown(case, Step(kv_tokens=0, q_tokens=min(past, case.chunk_tokens)), roofs)
    return max(breakdown.spread_s(roofs) / breakdown.seconds for breakdown in (decode, chunk))
