"""Seconds of the steps of continuous batching, from the same ops and rates as a single prediction.

A step is the weights' products over all its tokens, the recurrent states, the decodes' attention and each prefill
chunk's own. Decodes' attention reads every cached token once, so a step's time is affine in the tokens cached. A
drafter's window is taken as full, whatever the context, as it is in memory.
"""

from collections.abc import Sequence

from twin.ask.case import Case
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.errors import Impossible
from twin.memory.block_pool import KVPool
from twin.operations.lower import backbone_program, draft_prefill_program, head_program, prefill_attention_program
from twin.operations.ops import Step
from twin.prediction import decode_breakdown_of
from twin.serving.protocols import StepCosts

FAR = 4096
"""Cached tokens a sequence over which the slope is taken; any number gives the same."""

FAR_IN_PROGRAMS = 2**17
"""The same where attention is cut into programs: they fill a device by steps, which even out over long contexts."""


class CaseCosts(StepCosts):
    """Steps of one case on one machine; a step's parts are looked up once."""

    def __init__(self, case: Case, roofs: Roofs) -> None:
        if case.model.indexer is not None:
            raise Impossible(f"serving is modelled for attention that reads its whole cache, not for {case.model.name}")
        self.case, self.roofs = case, roofs
        self.devices = roofs.profile.gpu_count
        self._decodes: dict[int, tuple[float, float]] = {}
        self._backbones: dict[tuple[int, int, int], float] = {}

    def decode(self, sequences: int, ctx_tokens: int) -> tuple[float, float]:
        """Seconds of a step that decodes `sequences` over `ctx_tokens` cached tokens in all, and per token more."""
        base_s, token_s = self._decode(sequences)
        return base_s + token_s * ctx_tokens, token_s

    def mixed(self, sequences: int, ctx_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of the same step with prefill chunks (past tokens, new rows) beside it."""
        rows = self.case.speculation.tokens + 1 if self.case.speculation else 1
        tokens = rows * sequences + sum(new for _, new in chunks)
        seconds = self._backbone(tokens, sequences + len(chunks), rows * sequences + len(chunks))
        if sequences:
            base_s, token_s = self._decode(sequences)
            alone_s = self._backbone(rows * sequences, sequences, rows * sequences)
            seconds += base_s - alone_s + token_s * ctx_tokens
        return seconds + sum(self._chunk(past, new) for past, new in chunks)

    def _decode(self, sequences: int) -> tuple[float, float]:
        if sequences not in self._decodes:
            near = self.case.speculation.drafter.window if self.case.speculation else 0
            far = FAR_IN_PROGRAMS if self.case.rules.own_kernels.decode_plans else FAR
            near_s, far_s = (
                decode_breakdown_of(self.case, self.roofs, past, sequences).seconds for past in (near, near + far)
            )
            slope_s = (far_s - near_s) / far
            self._decodes[sequences] = near_s - slope_s * near, slope_s / sequences
        return self._decodes[sequences]

    def _backbone(self, tokens: int, sequences: int, logits: int) -> float:
        key = tokens, sequences, logits
        if key not in self._backbones:
            program = (
                *backbone_program(self.case, tokens, sequences, self.devices),
                *head_program(self.case, logits, self.devices),
            )
            self._backbones[key] = Breakdown().run(program, self.roofs).seconds
        return self._backbones[key]

    def _chunk(self, past: int, rows: int) -> float:
        chunk = Step(kv_tokens=past, q_tokens=rows)
        program = prefill_attention_program(self.case, chunk, self.devices)
        if self.case.speculation is not None:
            program += draft_prefill_program(self.case, self.case.speculation, chunk, self.devices - 1)
        return Breakdown().run(program, self.roofs).seconds


class CasePool:
    """The pool of a plan as the scheduler sees it: the engine's null block is nobody's."""

    def __init__(self, kv_pool: KVPool) -> None:
        self.blocks = max(0, kv_pool.blocks - 1)
        self._plan = kv_pool.plan
        self._groups = sum(group.kind == "attention" for group in kv_pool.plan.groups)
        self._block_tokens = kv_pool.plan.block_tokens
        self._sliding = any(group.kind == "sliding" for group in kv_pool.plan.groups)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence with so many cached tokens holds; with none, those of its recurrent states."""
        if self._sliding and tokens:
            return self._plan.blocks_per_request(tokens)
        return self._plan.state_blocks + self._groups * -(-tokens // self._block_tokens)
