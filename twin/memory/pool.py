"""The memory plan of an engine that shares one pool of blocks: what utilisation leaves for it, and what it holds.

Order as in vLLM 0.28.0 `v1/worker/gpu_worker.py`: share of the device, less weights, less the transient that the
start-up profile saw, less what back ends keep; the rest is cut into blocks (`twin/memory/block_pool.py`).
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.profile import HardwareProfile
from hwprofiles.rates import Rate
from twin.ask.case import Case
from twin.engines.rules import BlockPoolRules
from twin.errors import Impossible
from twin.memory.block_pool import BlockPlan, CacheSpec, PoolRules, plan_blocks
from twin.operations.counts import HALF_BYTES, embedding_bytes, head_bytes, layer_parameters, weight_bytes
from twin.operations.drafting import draft_token_bytes, draft_weight_bytes

KVARN_SLOTS_FREE = 8
"""Slots of the sidecar beyond two a sequence and one a tile of a step's tokens (`kvarn/config.py`)."""
SCRATCH_TOKENS = 262_144
LEAST_SCRATCH_TOKENS = 4_096
"""Bounds of the tokens that KVarN's prefill rebuilds at once (`KVARN_FA_SCRATCH_CAP`)."""


class KVPool(Struct, frozen=True, kw_only=True):
    """One pool of blocks, shared by all requests."""

    plan: BlockPlan
    pool_bytes: int
    blocks: int
    """Whole blocks; one of them is the engine's null block and holds nothing (`v1/core/block_pool.py`). None where the
    device does not hold a pool of given size."""
    max_model_tokens: int
    """Longest request that the engine is told to expect: what it prints depends on it."""

    @property
    def printed_tokens(self) -> int:
        """What the engine prints as the size of its cache, in tokens."""
        return self.plan.printed_tokens(self.blocks, self.max_model_tokens)

    @property
    def concurrency(self) -> float:
        """What it prints as the maximum concurrency at the longest request."""
        return self.plan.concurrency(self.blocks, self.max_model_tokens)

    def residents(self, tokens: int) -> int:
        """Requests of so many tokens each that the pool holds at once."""
        return max(0, self.blocks - 1) // self.plan.blocks_per_request(tokens)


def block_plan(case: Case) -> BlockPlan:
    """How the case's layers share blocks."""
    pool = pool_rules(case)
    return plan_blocks(_specs(case), _sharing(case, pool))


def pool_rules(case: Case) -> BlockPoolRules:
    """The engine's rules for its pool; Impossible where it has none."""
    if case.rules.block_pool is None:
        raise Impossible(f"{case.rules.name} shares no pool of blocks among requests")
    return case.rules.block_pool


def _sharing(case: Case, pool: BlockPoolRules) -> PoolRules:
    question = case.question
    return PoolRules(
        promotes_sliding=question.patched and question.promotes_windows,
        balances_groups=question.patched,
        speculative_tokens=case.speculation.tokens if case.speculation else 0,
        prefix_caching=question.prefix_caching,
        batched_tokens=pool.batched_tokens,
        async_scheduling=question.async_scheduling,
    )


def with_prefix_cache(case: Case) -> Case:
    """The case with what prefix caching does to its chunks, and with the prompt tokens that it finds.

    Recurrent states are kept at the ends of chunks only, so chunks are whole blocks, and the one usable state of a
    prompt lies at the last block's end, a block earlier under speculation (`v1/core/sched/scheduler.py`
    `_mamba_block_aligned_split`). Attention alone is found block by block, short of the last token.
    """
    question = case.question
    if question.cached_tokens and not question.prefix_caching:
        raise Impossible("cached tokens need prefix caching", hint="add --prefix-cache")
    if not question.prefix_caching:
        return case
    block = block_plan(case).block_tokens
    found = min(question.cached_tokens, question.ctx_tokens - 1) // block * block
    if case.model.recurrent is None:
        return replace(case, cached_tokens=found)
    chunk = case.chunk_tokens if question.chunk_tokens else max(1, case.chunk_tokens // block) * block
    if case.speculation:
        found = max(0, question.cached_tokens // block * block - block)
    return replace(case, chunk_tokens=chunk, cached_tokens=found)


def _specs(case: Case) -> list[CacheSpec]:
    """Types of layers that take blocks: attention, recurrent states, a block drafter's sliding windows."""
    model, speculation = case.model, case.speculation
    drafter = speculation.drafter if speculation else None
    follows = drafter.layers if drafter and not drafter.window else 0
    kernel_block = max(case.rules.page_tokens, case.fmt.tile_tokens)
    specs = [
        CacheSpec(
            kind="attention",
            layers=model.attention_layers + follows,
            token_bytes=case.plane_bytes,
            kernel_block=kernel_block,
            takes_padding=case.fmt.tile_tokens == 1,  # a page of tiles leaves no gap
        )
    ]
    if model.recurrent is not None:
        drafted = speculation.tokens if speculation else 0
        tail = model.recurrent.conv_channels * (model.recurrent.conv_kernel - 1 + drafted) * HALF_BYTES
        state = model.recurrent.state_elements * case.state_element_bytes
        specs.append(CacheSpec(kind="recurrent", layers=model.recurrent_layers, state_bytes=state + tail))
    if drafter and drafter.window:
        token_bytes = draft_token_bytes(case, drafter)
        specs.append(
            CacheSpec(
                kind="sliding",
                layers=drafter.layers,
                token_bytes=token_bytes,
                window=drafter.window,
                kernel_block=kernel_block,
            )
        )
    return specs


def plan_pool(case: Case, profile: HardwareProfile) -> tuple[KVPool, dict[str, float], float]:
    """The pool, the bytes by part that are taken before it, and the standard deviation of what is left, in bytes.

    A pool of given size that the device does not hold has no blocks: the engine takes the number as it is and runs out
    of memory when it allocates (`--kv-cache-memory-bytes`). What is outside the engine's share is squeezed first: a
    published pool of KVarN beside a drafter leaves half of it, and runs.
    """
    rules = pool_rules(case)
    parts = fixed_parts(case, rules)
    given = case.question.pool_bytes
    pool_bytes = int(share_bytes(case, profile) - sum(parts.values())) if given is None else given
    there = given is None or sum(parts.values()) + given <= profile.gpu.vram.value
    plan = block_plan(case)
    pool = KVPool(
        plan=plan,
        pool_bytes=max(0, pool_bytes),
        blocks=max(0, plan.blocks_in(pool_bytes)) if there else 0,
        max_model_tokens=case.question.max_model_tokens or case.question.ctx_tokens,
    )
    spread = 0.0 if given is not None else _spread(case, rules, profile)
    return pool, parts, spread


def share_bytes(case: Case, profile: HardwareProfile) -> float:
    """Bytes of the device that the engine may take."""
    return profile.gpu.vram.value * (case.question.utilisation or pool_rules(case).utilisation)


def most_pool_bytes(case: Case, profile: HardwareProfile) -> int:
    """Bytes of the largest pool that leaves room for what lies before it and outside of it, at least 0."""
    rules = pool_rules(case)
    return max(0, int(profile.gpu.vram.value - sum(fixed_parts(case, rules).values()) - rules.untracked.value))


def fixed_parts(case: Case, rules: BlockPoolRules) -> dict[str, float]:
    """Bytes by part that lie on the device before any block."""
    model, question = case.model, case.question
    weights = sum(layer_parameters(model, kind) for kind in model.layer_kinds)
    parts = {
        "weights": weight_bytes(model, weights) + head_bytes(model),
        "embedding": float(embedding_bytes(model)),
        "drafter": draft_weight_bytes(case.speculation),
        "activations": _activations(case, rules).value,
        "graphs": _graphs(case, rules).value,
        "backend workspace": rules.backend_workspace[case.backend].value
        if case.backend in rules.backend_workspace
        else 0.0,
    }
    if case.fmt.sidecar_bytes:
        sequences = question.max_sequences or max(rules.max_sequences, question.batch)
        parts |= {
            "unquantised tiles": float(_sidecar_bytes(case, sequences, rules.batched_tokens)),
            "prefill scratch": float(_rebuilt_bytes(case, sequences)),
        }
    if case.backend in rules.dequantises_prefix:
        parts["prefill scratch"] = float(_longest(case) * _decoded_bytes(case))
    return {name: size for name, size in parts.items() if size}


def scratch_token_bytes(case: Case) -> float:
    """Bytes that prefill takes outside the profile for every token of context; 0 where scratch is bounded."""
    copies = pool_rules(case).dequantises_prefix.get(case.backend)
    return copies.value * _decoded_bytes(case) if copies else 0.0


def _longest(case: Case) -> int:
    """Longest request that buffers are sized for: what the engine is told, or else what the model takes."""
    return case.question.max_model_tokens or max(case.question.ctx_tokens, case.model.native_ctx_tokens)


def _decoded_bytes(case: Case) -> int:
    """K and V of one token and layer in 16 bits."""
    return 2 * case.model.attention.kv_heads * case.model.attention.head_dim * HALF_BYTES


def _sidecar_bytes(case: Case, sequences: int, batched_tokens: int) -> int:
    """Tiles that wait for their last token, and every sequence's first: 2 a sequence, a step's tokens, 8 free."""
    tile = case.fmt.tile_tokens
    slots = 2 * sequences + -(-batched_tokens // tile) + KVARN_SLOTS_FREE
    return slots * tile * _decoded_bytes(case) * case.model.attention_layers


def _rebuilt_bytes(case: Case, sequences: int) -> int:
    """Scratch in which a prefill chunk finds its history in 16 bits, one for all layers."""
    tokens = max(min(sequences * _longest(case), SCRATCH_TOKENS), LEAST_SCRATCH_TOKENS)
    return tokens * _decoded_bytes(case)


def _activations(case: Case, rules: BlockPoolRules) -> Rate:
    return rules.cold_activations if case.question.cold_start else rules.activations


def _graphs(case: Case, rules: BlockPoolRules) -> Rate:
    """Captured graphs: a block drafter's runner keeps far more of them, the more the longer its drafts."""
    speculation = case.speculation
    if speculation is None or speculation.drafter.kind == "sequential":
        return rules.graphs
    long = speculation.tokens >= speculation.drafter.block_tokens
    return rules.long_draft_graphs if long else rules.draft_graphs


def _spread(case: Case, rules: BlockPoolRules, profile: HardwareProfile) -> float:
    rates = [_activations(case, rules), _graphs(case, rules), profile.gpu.vram]
    if case.backend in rules.backend_workspace:
        rates.append(rules.backend_workspace[case.backend])
    return math.hypot(*(rate.value * rate.spread for rate in rates))
