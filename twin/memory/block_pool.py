"""vLLM's pool of KV blocks: how many bytes it has, and how many blocks they make.

The engine's share of the device, less weights, less the transient that the start-up profile saw, less what back ends
keep. Sources: vLLM 0.28.0, `v1/worker/gpu_worker.py` for the order of what is taken off.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.profile import HardwareProfile
from twin.ask.case import Case, Ends
from twin.errors import Impossible
from twin.memory.blocks import BlockPlan, PoolSettings, plan_blocks
from twin.memory.cache_specs import cache_specs
from twin.memory.startup import batched_tokens, most_sequences, pool_rules, startup_parts
from twin.models.sharded import staged
from twin.operations.counts import HALF_BYTES
from twin.operations.lower import draft_weight_bytes

KVARN_SLOTS_FREE = 8  # slots of the sidecar beyond two a sequence and one a tile of a step (`kvarn/config.py`)
TILES_SHARE = 0.5  # of the engine's share less weights that the sidecar may take (`POOL_USABLE_SHARE_DEFAULT`)
SCRATCH_TOKENS = 262_144
LEAST_SCRATCH_TOKENS = 4_096  # bounds of the tokens that KVarN's prefill rebuilds at once (`KVARN_FA_SCRATCH_CAP`)


class PoolLimits(Struct, frozen=True, kw_only=True):
    """What the engine runs with: its defaults on the card, or what was asked."""

    utilisation: float  # share of memory that it may take
    batched_tokens: int  # tokens of one step
    max_sequences: int


class KVPool(Struct, frozen=True, kw_only=True):
    """One pool of blocks, shared by all requests."""

    plan: BlockPlan
    pool_bytes: int
    blocks: int
    """Whole blocks; one of them is the engine's null block and holds nothing (`v1/core/block_pool.py`). 0 where the
    device does not hold a pool of given size."""
    max_model_tokens: int  # longest request that the engine is told to expect: what it prints depends on it
    limits: PoolLimits
    null_blocks: int = 1  # blocks that are nobody's
    window_tokens: int = 0  # tokens of a pool that windows have of their own
    states: int = 0  # whole sequences' states in a pool of their own

    @property
    def printed_tokens(self) -> int:
        """What the engine prints as the size of its cache, in tokens."""
        return self.plan.printed_tokens(self.blocks, self.max_model_tokens)

    @property
    def concurrency(self) -> float:
        """What it prints as the maximum concurrency at the longest request."""
        return self.plan.concurrency(self.blocks, self.max_model_tokens)


def block_plan(case: Case) -> BlockPlan:
    """How the case's layers share blocks."""
    question = case.question
    settings = PoolSettings(
        promotes_sliding=question.patched and question.promotes_windows,
        balances_groups=question.patched,
        speculative_tokens=case.speculation.tokens if case.speculation else 0,
        prefix_caching=question.prefix_caching,
        batched_tokens=batched_tokens(case),
        async_scheduling=question.async_scheduling,
    )
    return plan_blocks(cache_specs(case), settings)


def pool_stages(case: Case, stages: int) -> list[Case]:
    """The case as each stage of layers sees it. Impossible where there are fewer layers, or tokens are drafted.

    As even as whole layers go, the larger shares before the last stage (`distributed/utils.py` `get_pp_indices`).
    """
    if stages == 1:
        return [case]
    if case.speculation is not None:
        raise Impossible("speculation is modelled on one stage of layers", hint="--tp shares layers among all devices")
    even, more = divmod(case.model.layers, stages)
    if not even:
        raise Impossible(f"{case.model.name} has {case.model.layers} layers, fewer than {stages} stages")
    sizes = [even + (stages - 1 - more <= stage < stages - 1) for stage in range(stages)]
    cases: list[Case] = []
    for stage, size in enumerate(sizes):
        model = staged(case.model, sum(sizes[:stage]), size)
        ends = Ends(first=stage == 0, last=stage == stages - 1)
        cases.append(replace(case, model=model, mixer=model.attention, ends=ends))
    return cases


def with_step_limits(case: Case, profile: HardwareProfile) -> Case:
    """The case with the most tokens and sequences of a step that its engine takes by default on that device."""
    rules, gpu, pool = case.rules, profile.gpu, pool_rules(case)
    limits = next((limits for limits in pool.larger if limits.hold_for(gpu.name, gpu.vram.value)), None)
    if limits is not None:
        pool = replace(pool, batched_tokens=limits.batched_tokens, max_sequences=limits.max_sequences, larger=())
        rules = replace(rules, chunk_tokens=limits.batched_tokens, block_pool=pool)
        chunk = case.question.chunk_tokens or limits.batched_tokens
        case = with_prefix_cache(replace(case, rules=rules, chunk_tokens=chunk, cached_tokens=0))
    if case.fmt.sidecar_bytes:
        stages = (stage for stage in pool_stages(case, case.stages(profile.gpu_count)) if stage.model.caches)
        most = min((pool.max_sequences, *(_sequences_with_tiles(stage, profile) for stage in stages)))
        case = replace(case, rules=replace(rules, block_pool=replace(pool, max_sequences=most)))
    return case


def _sequences_with_tiles(case: Case, profile: HardwareProfile) -> int:
    """Sequences whose unquantised tiles fill half of what weights leave of the engine's share (`kvarn/config.py`)."""
    room = share_bytes(case, profile) - sum(case.model.weight_bytes.values())
    slots = int(TILES_SHARE * room / _slot_bytes(case))
    return max(1, (slots - _other_slots(case)) // 2)


def _slot_bytes(case: Case) -> int:
    """A tile of every layer in 16 bits."""
    half = (
        sum(case.of(mixer).attention.kv_elements * layers for mixer, layers in case.model.caches.items()) * HALF_BYTES
    )
    return case.fmt.tile_tokens * half


def _other_slots(case: Case) -> int:
    """Slots beyond those of sequences: of the tiles of one step, and some more."""
    return -(-batched_tokens(case) // case.fmt.tile_tokens) + KVARN_SLOTS_FREE


def with_prefix_cache(case: Case) -> Case:
    """The case with what prefix caching does to its chunks, and with the prompt tokens that it finds.

    Recurrent states are kept at the ends of chunks only, so chunks are whole blocks, and the one usable state of a
    prompt lies at the last block's end, a block earlier under speculation (`v1/core/sched/scheduler.py`
    `_mamba_block_aligned_split`). Attention alone is found block by block, short of the last token. With pools of
    tokens chunks stay as they are, and states are kept every so many tokens.
    """
    question = case.question
    if question.cached_tokens and not question.prefix_caching:
        raise Impossible("cached tokens need prefix caching", hint="add --prefix-cache")
    if not question.prefix_caching:
        return case
    tokens = case.rules.token_pool
    if tokens is not None:
        kept = tokens.state_kept_every if case.model.states else case.rules.page_tokens
        return replace(case, cached_tokens=min(question.cached_tokens, question.ctx_tokens - 1) // kept * kept)
    block = block_plan(case).block_tokens
    found = min(question.cached_tokens, question.ctx_tokens - 1) // block * block
    if not case.model.states:
        return replace(case, cached_tokens=found)
    chunk = case.chunk_tokens if question.chunk_tokens else max(1, case.chunk_tokens // block) * block
    if case.speculation:
        found = max(0, question.cached_tokens // block * block - block)
    return replace(case, chunk_tokens=chunk, cached_tokens=found)


def plan_pool(case: Case, profile: HardwareProfile) -> tuple[KVPool, dict[str, float], float]:
    """The pool, the bytes by part that are taken before it, and the standard deviation of what is left, in bytes.

    A pool of given size that the device does not hold has no blocks: the engine takes the number as it is and runs out
    of memory when it allocates (`--kv-cache-memory-bytes`). What is outside the engine's share is squeezed first: a
    published pool of KVarN beside a drafter leaves half of it, and runs.
    """
    taken = startup_parts(case, profile.gpu)
    parts = fixed_parts(case, profile)
    given = case.question.pool_bytes
    pool_bytes = int(share_bytes(case, profile) - sum(parts.values())) if given is None else given
    held = given is None or sum(parts.values()) + given <= profile.gpu.vram.value
    plan = block_plan(case)
    pool = KVPool(
        plan=plan,
        pool_bytes=max(0, pool_bytes),
        blocks=max(0, plan.blocks_in(pool_bytes)) if held else 0,
        max_model_tokens=case.question.max_model_tokens or case.question.ctx_tokens,
        limits=PoolLimits(
            utilisation=case.question.utilisation or pool_rules(case).utilisation,
            batched_tokens=batched_tokens(case),
            max_sequences=most_sequences(case),
        ),
    )
    uncertain = (*taken.values(), profile.gpu.vram) if given is None else ()
    return pool, parts, math.hypot(*(rate.deviation for rate in uncertain))


def share_bytes(case: Case, profile: HardwareProfile) -> float:
    """Bytes of the device that the engine may take."""
    return profile.gpu.vram.value * (case.question.utilisation or pool_rules(case).utilisation)


def most_pool_bytes(case: Case, profile: HardwareProfile) -> int:
    """Bytes of the largest pool that leaves room for what lies before it and outside of it, at least 0."""
    rules = pool_rules(case)
    return max(0, int(profile.gpu.vram.value - sum(fixed_parts(case, profile).values()) - rules.untracked.value))


def loaded_parts(case: Case) -> dict[str, float]:
    """Bytes by part of what is loaded on the device. A stage has the ends of the model that are its own."""
    model = case.model
    sizes = model.weight_bytes
    embedding = sizes.pop("embedding")
    if not case.ends.last:
        sizes.pop("head", None)
    if not (case.ends.first or (case.ends.last and model.tied)):
        embedding = 0.0
    towers = {name: count for name, count in model.towers.items() if name != "mtp"}
    return {
        "weights": sum(sizes.values()),
        "embedding": embedding,
        **{f"{name} tower": float(HALF_BYTES * count) for name, count in towers.items()},
        "drafter": draft_weight_bytes(case.speculation),
    }


def fixed_parts(case: Case, profile: HardwareProfile) -> dict[str, float]:
    """Bytes by part that lie on the device before any block."""
    question = case.question
    parts = loaded_parts(case) | {name: rate.value for name, rate in startup_parts(case, profile.gpu).items()}
    longest = question.max_model_tokens or max(question.ctx_tokens, case.model.native_ctx_tokens)
    if case.fmt.sidecar_bytes:
        sequences = most_sequences(case)
        rebuilt = max(min(sequences * longest, SCRATCH_TOKENS), LEAST_SCRATCH_TOKENS)
        # tiles that wait for their last token, and every sequence's first
        parts["unquantised tiles"] = float((2 * sequences + _other_slots(case)) * _slot_bytes(case))
        parts["prefill scratch"] = float(rebuilt * _half_token_bytes(case))
    if case.backend in pool_rules(case).dequantises_prefix:
        parts["prefill scratch"] = float(longest * _half_token_bytes(case))
    return {name: size for name, size in parts.items() if size}


def scratch_token_bytes(case: Case) -> float:
    """Bytes that prefill takes outside the profile for every token of context; 0 where scratch is bounded."""
    copies = pool_rules(case).dequantises_prefix.get(case.backend)
    return copies.value * _half_token_bytes(case) if copies else 0.0


def _half_token_bytes(case: Case) -> int:
    """K and V of one token and layer in 16 bits."""
    return case.mixer.kv_elements * HALF_BYTES if case.mixer else 0
