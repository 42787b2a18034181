"""vLLM's pool of KV blocks: how many bytes it has, how it is cut into blocks, and how many of them a request takes.

First the arithmetic of blocks, in integers alone: layers of all types draw blocks from one pool, so that a block of
one type must be as long as a block of any other. A recurrent state of megabytes stretches the attention block to
hundreds of tokens, and every group of layers takes whole blocks of its own. Then the pool of a case: the engine's share
of the device, less weights, less the transient that the start-up profile saw, less what back ends keep.

Sources: vLLM 0.28.0, `v1/core/kv_cache_utils.py` where no file is named and `v1/worker/gpu_worker.py` for the order of
what is taken off, and two patches of syv-ai/qwen38-27b-rtx3090.
"""

import math
from collections import Counter
from collections.abc import Sequence
from math import gcd
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.profile import HardwareProfile
from hwprofiles.rates import Rate
from twin.ask.case import Case
from twin.engines.rules import BlockPoolRules
from twin.errors import BadValue, Impossible
from twin.operations.counts import HALF_BYTES
from twin.operations.lower import draft_token_bytes, draft_weight_bytes

KVARN_SLOTS_FREE = 8  # slots of the sidecar beyond two a sequence and one a tile of a step (`kvarn/config.py`)
SCRATCH_TOKENS = 262_144
LEAST_SCRATCH_TOKENS = 4_096  # bounds of the tokens that KVarN's prefill rebuilds at once (`KVARN_FA_SCRATCH_CAP`)

LayerKind = Literal["attention", "recurrent", "sliding"]

_SIZES = {"attention": ("token_bytes",), "recurrent": ("state_bytes",), "sliding": ("token_bytes", "window")}


class CacheSpec(Struct, frozen=True, kw_only=True):
    """Layers of one type: what each of them keeps of a request. Sizes that its kind has not are 0."""

    kind: LayerKind
    layers: int
    token_bytes: int = 0  # bytes per token and layer, of attention and sliding layers
    state_bytes: int = 0  # bytes of one recurrent state and its convolution tail in one layer, before padding
    window: int = 0  # tokens that a sliding layer looks back on, the last one included
    kernel_block: int = 16
    """Tokens of the shortest block that the kernel takes, or `--block-size` if that is longer; KVarN's tile is 128."""
    takes_padding: bool = True
    """Whether the backend finds pages by their stride (`indexes_kv_by_block_stride`), so that a page may have a gap."""

    def __post_init__(self) -> None:
        for name in ("layers", "kernel_block", "token_bytes", "state_bytes", "window"):
            value, needed = getattr(self, name), name in ("layers", "kernel_block", *_SIZES[self.kind])
            if (needed and value < 1) or (value and not needed):
                raise BadValue(f"{name} of {self.kind} layers is {value}, it must be {'at least 1' if needed else '0'}")


class PoolSettings(Struct, frozen=True, kw_only=True):
    """What the engine is told, and which patches it carries."""

    promotes_sliding: bool  # patch hybrid-sw-block-promote: odd pages get more tokens instead of a gap
    balances_groups: bool  # patch hybrid-kv-groups: few sliding layers are padded rather than all the others
    speculative_tokens: int  # tokens drafted per step, k
    prefix_caching: bool  # whether states are kept at block boundaries (`mamba_cache_mode` align), or the last
    batched_tokens: int  # most tokens of one step (`max_num_batched_tokens`)
    async_scheduling: bool  # whether a step is scheduled while the one before it runs


class Group(Struct, frozen=True, kw_only=True):
    """Layers that share a block table: a block of theirs holds one page of each."""

    kind: LayerKind
    layers: int  # layers really in it; its blocks are as long as those of a full group
    block_tokens: int  # tokens in a block; 0 for states, which stand for any number
    page_bytes: int  # bytes used of a page in one layer; the plan's page is at least as long
    reach_tokens: int  # most tokens of a sliding group: window - 1 and steps in flight (`max_in_flight_tokens`)
    states: int  # blocks of a recurrent group of a request: 1 + k, 2 + k with prefix caching (`MambaSpec`)

    def blocks(self, tokens: int) -> int:
        """Blocks that vLLM reserves for a request of that many tokens (`max_memory_usage_bytes` of its spec / page)."""
        if self.kind == "recurrent":
            return self.states
        if self.kind == "sliding":
            return _ceil(min(self.reach_tokens, tokens), self.block_tokens) + 1  # a window starts amid a block
        return _ceil(tokens, self.block_tokens)


class BlockPlan(Struct, frozen=True, kw_only=True):
    """How a pool is divided into blocks, whatever its size."""

    block_tokens: int  # tokens in a block of attention
    page_bytes: int  # bytes of a block in one layer, the same in every group
    group_layers: int  # layers of a full group, g
    groups: tuple[Group, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a page for each layer of a full group (`get_kv_cache_config_from_groups`)."""
        return self.group_layers * self.page_bytes

    @property
    def state_blocks(self) -> int:
        """Blocks of recurrent state that every request holds, however short; 0 without recurrent layers."""
        return sum(group.states for group in self.groups)

    def blocks_in(self, pool_bytes: int) -> int:
        """Whole blocks in a pool. One of them becomes vLLM's null block, yet it counts in all that vLLM prints."""
        return pool_bytes // self.block_bytes

    def blocks_per_request(self, tokens: int) -> int:
        """Blocks of one request of that many tokens over all groups; at least 1 token."""
        if tokens < 1:
            raise BadValue(f"a request has at least 1 token, not {tokens}")
        return sum(group.blocks(tokens) for group in self.groups)

    def bytes_per_request(self, tokens: int) -> int:
        """Bytes of the pool that one request of that many tokens takes, padding included."""
        return self.blocks_per_request(tokens) * self.block_bytes

    def concurrency(self, blocks: int, max_tokens: int) -> float:
        """The "Maximum concurrency" that vLLM prints (`get_max_concurrency_for_kv_cache_config`)."""
        return blocks / self.blocks_per_request(max_tokens)

    def printed_tokens(self, blocks: int, max_tokens: int) -> int:
        """The "GPU KV cache size" that vLLM prints, concurrency x `max_model_len`: it depends on what was asked."""
        return blocks * max_tokens // self.blocks_per_request(max_tokens)


_Blocks = dict[CacheSpec, int]  # tokens in a block of each type, 0 for states


def plan_blocks(specs: Sequence[CacheSpec], rules: PoolSettings) -> BlockPlan:
    """Block, page and groups of layers, alike ones together; Impossible where no such plan is known."""
    layers: Counter[CacheSpec] = Counter()
    for spec in specs:
        layers[replace(spec, layers=1)] += spec.layers
    blocks = _born([replace(spec, layers=count) for spec, count in layers.items()])
    blocks = _unified(_promoted(blocks) if rules.promotes_sliding else blocks)
    full = _group_layers([*blocks], balances=rules.balances_groups)
    return BlockPlan(
        block_tokens=next(tokens for spec, tokens in blocks.items() if spec.kind == "attention"),
        page_bytes=_longest_page(blocks),
        group_layers=full,
        groups=tuple(group for spec, tokens in blocks.items() for group in _split(spec, tokens, full, rules)),
    )


def _born(types: Sequence[CacheSpec]) -> _Blocks:
    """Blocks before any is matched to another: the kernel's shortest, a; attention's grows until a page covers a state.

    a * ceil(P / (a t)) tokens for a state of P bytes and t bytes per token (`interface.py` `_align_hybrid_block_size`).
    """
    attention = [spec for spec in types if spec.kind == "attention"]
    if len(attention) != 1:
        raise Impossible(f"{len(attention)} types of attention layers, a pool is planned for exactly 1")
    blocks = {spec: 0 if spec.kind == "recurrent" else spec.kernel_block for spec in types}
    state_bytes = max(spec.state_bytes for spec in types)
    blocks[attention[0]] *= max(1, _ceil(state_bytes, attention[0].kernel_block * attention[0].token_bytes))
    return blocks


def _promoted(blocks: _Blocks) -> _Blocks:
    """Pages that do not divide the longest grow to cover it, if the rest can follow (hybrid-sw-block-promote)."""
    page = _longest_page(blocks)
    odd = {spec: tokens for spec, tokens in blocks.items() if page % _page(spec, tokens)}
    grown = blocks | {spec: tokens * _ceil(page, _page(spec, tokens)) for spec, tokens in odd.items()}
    longest = _longest_page(grown)
    return grown if all(spec in odd or _growth(longest, spec, tokens) for spec, tokens in blocks.items()) else blocks


def _unified(blocks: _Blocks) -> _Blocks:
    """Pages as long as the longest: more tokens where it divides, else a gap (`unify_kv_cache_spec_page_size`)."""
    page = _longest_page(blocks)
    growth = {spec: _growth(page, spec, tokens) for spec, tokens in blocks.items()}
    stuck = [spec.kind for spec in blocks if not growth[spec]]
    if stuck:
        raise Impossible(f"a page of {stuck[0]} layers neither divides {page:,} B, the longest, nor may have a gap")
    return {spec: tokens * growth[spec] for spec, tokens in blocks.items()}


def _growth(page: int, spec: CacheSpec, tokens: int) -> int:
    """By how much its block grows to a page that long: 1 if the rest may be a gap, 0 if there is no way."""
    own = _page(spec, tokens)
    return int(spec.kind == "recurrent" or spec.takes_padding) if page % own else page // own


def _page(spec: CacheSpec, tokens: int) -> int:
    return spec.state_bytes or tokens * spec.token_bytes


def _longest_page(blocks: _Blocks) -> int:
    return max(_page(spec, tokens) for spec, tokens in blocks.items())


def _group_layers(types: Sequence[CacheSpec], *, balances: bool) -> int:
    """g: the fewest layers of a type, or the most if below 1.5 x that (`_get_kv_cache_groups_uniform_page_size`).

    Where the fewest are sliding, hybrid-kv-groups takes the largest divisor of the others that pads no sliding type by
    more than itself: padding a window costs a few blocks, padding the others costs bytes of every token. Where they are
    not, no divisor of the others is larger.
    """
    fewest, most = min(spec.layers for spec in types), max(spec.layers for spec in types)
    sliding = [spec.layers for spec in types if spec.kind == "sliding"]
    if 2 * most < 3 * fewest:
        return most
    if not balances:
        return fewest
    common = gcd(*(spec.layers for spec in types if spec.kind != "sliding"))
    divisors = (size for size in range(common, fewest, -1) if common % size == 0)
    return next((size for size in divisors if all(-layers % size <= layers for layers in sliding)), fewest)


def _split(spec: CacheSpec, tokens: int, full: int, rules: PoolSettings) -> list[Group]:
    """Groups of at most `full` layers, as even as they go (`layers[i::num_groups]`)."""
    count = _ceil(spec.layers, full)
    in_flight = rules.batched_tokens * (2 if rules.async_scheduling else 1)
    states = rules.speculative_tokens + (2 if rules.prefix_caching else 1)
    return [
        Group(
            kind=spec.kind,
            layers=len(range(first, spec.layers, count)),
            block_tokens=tokens,
            page_bytes=_page(spec, tokens),
            reach_tokens=spec.window - 1 + in_flight if spec.kind == "sliding" else 0,
            states=states if spec.kind == "recurrent" else 0,
        )
        for first in range(count)
    ]


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


# The pool of a case


class KVPool(Struct, frozen=True, kw_only=True):
    """One pool of blocks, shared by all requests."""

    plan: BlockPlan
    pool_bytes: int
    blocks: int
    """Whole blocks; one of them is the engine's null block and holds nothing (`v1/core/block_pool.py`). None where the
    device does not hold a pool of given size."""
    max_model_tokens: int  # longest request that the engine is told to expect: what it prints depends on it

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
    question, rules = case.question, pool_rules(case)
    settings = PoolSettings(
        promotes_sliding=question.patched and question.promotes_windows,
        balances_groups=question.patched,
        speculative_tokens=case.speculation.tokens if case.speculation else 0,
        prefix_caching=question.prefix_caching,
        batched_tokens=rules.batched_tokens,
        async_scheduling=question.async_scheduling,
    )
    return plan_blocks(_specs(case), settings)


def pool_rules(case: Case) -> BlockPoolRules:
    """The engine's rules for its pool; Impossible where it has none."""
    if case.rules.block_pool is None:
        raise Impossible(f"{case.rules.name} shares no pool of blocks among requests")
    return case.rules.block_pool


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
    if not case.model.states:
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
    specs = []
    for mixer, layers in model.caches.items():
        own = case.of(mixer)
        followers, follows = (follows, 0) if not mixer.reach else (0, follows)
        specs.append(
            CacheSpec(
                kind="sliding" if mixer.reach else "attention",
                layers=layers + followers,
                token_bytes=own.plane_bytes,
                window=mixer.reach,
                kernel_block=kernel_block,
                takes_padding=case.fmt.tile_tokens == 1,  # a page of tiles leaves no gap
            )
        )
    drafted = speculation.tokens if speculation else 0
    for state, layers in model.states.items():
        tail = state.conv_channels * (state.conv_kernel - 1 + drafted) * HALF_BYTES
        size = state.state_elements * case.state_element_bytes + tail
        specs.append(CacheSpec(kind="recurrent", layers=layers, state_bytes=size))
    if drafter and drafter.window:
        layers, window, token_bytes = drafter.layers, drafter.window, draft_token_bytes(case, drafter)
        sliding = CacheSpec(
            kind="sliding", layers=layers, token_bytes=token_bytes, window=window, kernel_block=kernel_block
        )
        specs.append(sliding)
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
    held = given is None or sum(parts.values()) + given <= profile.gpu.vram.value
    plan = block_plan(case)
    pool = KVPool(
        plan=plan,
        pool_bytes=max(0, pool_bytes),
        blocks=max(0, plan.blocks_in(pool_bytes)) if held else 0,
        max_model_tokens=case.question.max_model_tokens or case.question.ctx_tokens,
    )
    uncertain = (*_taken(case, rules).values(), profile.gpu.vram) if given is None else ()
    return pool, parts, math.hypot(*(rate.deviation for rate in uncertain))


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
    sizes = model.weight_bytes
    embedding = sizes.pop("embedding")
    parts = {
        "weights": sum(sizes.values()),
        "embedding": embedding,
        "drafter": draft_weight_bytes(case.speculation),
        **{name: rate.value for name, rate in _taken(case, rules).items()},
    }
    longest = question.max_model_tokens or max(question.ctx_tokens, model.native_ctx_tokens)
    if case.fmt.sidecar_bytes:
        sequences = question.max_sequences or max(rules.max_sequences, question.batch)
        rebuilt = max(min(sequences * longest, SCRATCH_TOKENS), LEAST_SCRATCH_TOKENS)
        # tiles that wait for their last token, and every sequence's first
        slots = 2 * sequences + _ceil(rules.batched_tokens, case.fmt.tile_tokens) + KVARN_SLOTS_FREE
        half = sum(case.of(mixer).attention.kv_elements * layers for mixer, layers in model.caches.items()) * HALF_BYTES
        slot_bytes = case.fmt.tile_tokens * half
        parts["unquantised tiles"] = float(slots * slot_bytes)
        parts["prefill scratch"] = float(rebuilt * _half_token_bytes(case))
    if case.backend in rules.dequantises_prefix:
        parts["prefill scratch"] = float(longest * _half_token_bytes(case))
    return {name: size for name, size in parts.items() if size}


def _taken(case: Case, rules: BlockPoolRules) -> dict[str, Rate]:
    """What the engine itself takes, by part. A block drafter's runner captures more graphs, the longer its drafts."""
    graphs, speculation = rules.graphs, case.speculation
    if speculation is not None and speculation.drafter.kind == "block":
        long = speculation.tokens >= speculation.drafter.block_tokens
        graphs = rules.long_draft_graphs if long else rules.draft_graphs
    taken = {"activations": rules.cold_activations if case.question.cold_start else rules.activations, "graphs": graphs}
    if case.backend in rules.backend_workspace:
        taken["backend workspace"] = rules.backend_workspace[case.backend]
    return taken


def scratch_token_bytes(case: Case) -> float:
    """Bytes that prefill takes outside the profile for every token of context; 0 where scratch is bounded."""
    copies = pool_rules(case).dequantises_prefix.get(case.backend)
    return copies.value * _half_token_bytes(case) if copies else 0.0


def _half_token_bytes(case: Case) -> int:
    """K and V of one token and layer in 16 bits."""
    return case.mixer.kv_elements * HALF_BYTES if case.mixer else 0
