"""Pools of single tokens: how many of them what a card has free before and after loading weights makes.

Layers that attend to all tokens share one pool, windows a second of a share of its tokens, recurrent states a third.
Sources: SGLang 0.5.15, `srt/model_executor/pool_configurator.py` (tokens, windows), `model_runner_kv_cache_mixin.py`
(`_profile_available_bytes`, `handle_max_mamba_cache`) and `srt/server_args.py` (`_handle_gpu_memory_settings`).
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.links import PCIE
from hwprofiles.profile import HardwareProfile
from twin.ask.case import Case
from twin.engines.rules import CardDefaults, TokenPoolRules
from twin.errors import Impossible
from twin.memory.block_pool import KVPool, PoolLimits, loaded_parts
from twin.memory.blocks import BlockPlan, Group
from twin.models.mixers import Attending, Attention
from twin.operations.counts import HALF_BYTES
from twin.operations.lower import draft_token_bytes
from twin.units import MAX_TOKENS

NVLINK = "nvlink"
FOUR = 4  # cards from which on more sequences are captured


class Ranks(Struct, frozen=True, kw_only=True):
    """Cards that share every layer, each with its part of the heads: what a card takes beside its own part."""

    cards: int = 1
    link: str = "pcie"  # what joins them


def ranks_of(case: Case, profile: HardwareProfile) -> Ranks:
    """The cards that share a layer of the case."""
    return Ranks(cards=case.tp, link=NVLINK if profile.gpu.peer_kind == NVLINK else PCIE)


class TokenPools(Struct, frozen=True, kw_only=True):
    """What a token and a sequence take on one card."""

    token_bytes: int  # of one token in all layers that keep every token
    window_bytes: int  # of one token in all layers with a pool of windows
    window_tokens: int  # the longest window, 0 without any
    sequence_bytes: int  # states of one sequence, 0 without any

    def cell_bytes(self, window_share: float) -> float:
        """Bytes for each token that the pool is said to have: where all layers have windows, these are its tokens."""
        return self.token_bytes + window_share * self.window_bytes if self.token_bytes else self.window_bytes


def rules_of(case: Case) -> TokenPoolRules:
    """The engine's rules for its pools; Impossible where it has none."""
    if case.rules.token_pool is None:
        raise Impossible(f"{case.rules.name} has no pools of tokens")
    return case.rules.token_pool


def card_defaults(rules: TokenPoolRules, profile: HardwareProfile) -> CardDefaults:
    """What the engine chooses on such a card."""
    memory = profile.gpu.vram.value + rules.driver_bytes
    return next((card for card in rules.by_card if memory < card.below_bytes), rules.by_card[-1])


def default_share(case: Case, profile: HardwareProfile) -> float:
    """The share that the engine takes unless told: all but what it reckons for transients and graphs."""
    rules, card, ranks = rules_of(case), card_defaults(rules_of(case), profile), ranks_of(case, profile)
    memory, chunk = profile.gpu.vram.value + rules.driver_bytes, case.question.chunk_tokens or card.chunk_tokens
    sequences = card.graph_sequences if ranks.cards < FOUR else card.graph_sequences_of_four
    reserved = rules.reserved_bytes + rules.reserved_per_chunk_token * max(chunk, rules.least_reserved_chunk)
    reserved += rules.reserved_per_sequence * sequences + rules.reserved_per_device * ranks.cards
    reserved += rules.reserved_per_prefill_graph * prefill_graphs(rules, chunk)
    if memory > rules.floor_from_bytes:
        reserved = max(reserved, rules.floor_bytes)
    share = round((memory - reserved) / memory, 3)
    tower = sum(count for name, count in case.model.towers.items() if name != "mtp")
    if tower:
        low, high = rules.tower_bounds
        more = rules.tower_slope * (tower / rules.tower_parameters - 1)
        share *= rules.tower_share * min(high, max(low, 1 - more))
    return share


def prefill_graphs(rules: TokenPoolRules, chunk_tokens: int) -> int:
    """Graphs that are captured for chunks of up to so many tokens: each step of sizes is wider than the one before."""
    graphs, size = 0, 0
    for last, step in rules.prefill_graph_steps:
        more = max(0, min(last, chunk_tokens) - size) // step
        graphs, size = graphs + more, last
    return graphs


def outside_bytes(case: Case, profile: HardwareProfile) -> float:
    """Bytes that are taken before anything is loaded: the context, and the buffers of cards that share layers.

    Between two numbers of cards that are known, a line.
    """
    rules, ranks = rules_of(case), ranks_of(case, profile)
    if ranks.cards == 1:
        return rules.context.value
    known = sorted((cards, rate.value) for cards, rate in rules.collectives[ranks.link].items())
    (few, low), (many, high) = known[0], known[-1]
    return rules.context.value + low + (high - low) * (min(max(ranks.cards, few), many) - few) / (many - few)


def token_pools(case: Case) -> TokenPools:
    """Bytes of one token and of one sequence, on a card that has all the layers with all their heads."""
    rules, model = rules_of(case), case.model
    full = {
        (mixer.kv_heads, mixer.head_dim) for mixer in model.caches if isinstance(mixer, Attention) and not mixer.reach
    }
    kept, windows = 0, 0
    longest = 0
    for mixer, layers in model.caches.items():
        own = case.of(mixer)
        size = (own.plane_bytes + own.index_key_bytes) * layers
        if _pools_window(rules, mixer, full):
            windows, longest = windows + size, max(longest, mixer.reach)
        else:
            kept += size
    speculation = case.speculation
    if speculation is not None:
        kept += draft_token_bytes(case, speculation.drafter) * speculation.drafter.layers
    states = 0
    for state, layers in model.states.items():
        tail = state.conv_channels * (state.conv_kernel - 1) * HALF_BYTES
        states += (state.state_elements * case.state_bytes_of(state) + tail) * layers
    return TokenPools(token_bytes=kept, window_bytes=windows, window_tokens=longest, sequence_bytes=states)


def _pools_window(rules: TokenPoolRules, mixer: Attending, full: set[tuple[int, int]]) -> bool:
    """Whether a layer's window has a pool of its own."""
    if not isinstance(mixer, Attention) or not mixer.reach:
        return False
    alike = (mixer.kv_heads, mixer.head_dim) in full
    return bool(mixer.local_chunk) or mixer.window < rules.whole_windows_from or not alike


def plan_token_pool(case: Case, profile: HardwareProfile) -> tuple[KVPool, dict[str, float], float]:
    """The pools, the bytes by part that are taken before the tokens, and the standard deviation of what is left.

    States take their share of the rest unless their number is asked for. A pool of given size is of tokens alone.
    """
    rules, question = rules_of(case), case.question
    parts = {**loaded_parts(case), "loading": rules.loading.value}
    rest = static_bytes(case, profile) - sum(parts.values())
    pools = token_pools(case)
    states = state_slots(case, pools, rest)
    if states:
        drafted = _drafted_tokens(case) * min(_asked_sequences(case), states // rules.states_per_sequence)
        parts["recurrent states"] = float(states * pools.sequence_bytes)
        parts["states of drafts"] = float(drafted * pools.sequence_bytes)
        rest -= parts["recurrent states"] + parts["states of drafts"]
    window_share = question.window_share or rules.window_share
    cell, page = max(1.0, pools.cell_bytes(window_share)), case.rules.page_tokens
    given = question.pool_bytes
    short = (pools.sequence_bytes and not states) or rest < 0 or (given is not None and given > rest)
    pool_bytes = max(0, int(rest)) if given is None else given
    blocks = 0 if short else min(int(pool_bytes / cell), MAX_TOKENS) // page
    windows = int(blocks * page * window_share) if pools.token_bytes else blocks * page
    most = _most_sequences(case, pools, states=states, tokens=blocks * page, windows=windows)
    if states and question.batch > max(1, states // rules.states_per_sequence):
        raise Impossible(
            f"{case.rules.name} runs at most {most:,} sequences at once here, for their states, not {question.batch:,}",
            hint="--state-slots sets the pool of states",
        )
    kv_pool = KVPool(
        plan=_plan(math.ceil(cell * page), page),
        pool_bytes=pool_bytes,
        blocks=blocks,
        null_blocks=0,  # the token that padding is written to lies beside the pool (`mem_cache/memory_pool.py`)
        max_model_tokens=question.max_model_tokens or question.ctx_tokens,
        limits=PoolLimits(
            utilisation=share_of(case, profile),
            batched_tokens=question.chunk_tokens or card_defaults(rules, profile).chunk_tokens,
            max_sequences=most,
        ),
        window_tokens=windows if pools.window_bytes else 0,
        states=states,
    )
    uncertain = (rules.context, rules.loading, profile.gpu.vram) if given is None else ()
    return kv_pool, parts, math.hypot(*(rate.deviation for rate in uncertain))


def share_of(case: Case, profile: HardwareProfile) -> float:
    """Share of what was free before loading that is for weights and pools."""
    return case.question.utilisation or default_share(case, profile)


def static_bytes(case: Case, profile: HardwareProfile) -> float:
    """Bytes for weights and pools."""
    before = profile.gpu.vram.value - outside_bytes(case, profile)
    return before * share_of(case, profile)


def most_token_bytes(case: Case, profile: HardwareProfile) -> int:
    """Bytes of the largest pool of tokens that the share leaves."""
    return plan_token_pool(replace(case, question=replace(case.question, pool_bytes=None)), profile)[0].pool_bytes


def state_slots(case: Case, pools: TokenPools, rest: float) -> int:
    """States of whole sequences that the pool of states holds: as asked, or of their share of what is left.

    Verified drafts keep a state for each token of theirs, for the sequences that may run (`handle_max_mamba_cache`).
    """
    rules = rules_of(case)
    if not pools.sequence_bytes:
        return 0
    if case.question.state_slots is not None:
        return case.question.state_slots
    each = pools.sequence_bytes * (1 + _drafted_tokens(case) / rules.states_per_sequence)
    return max(0, int(rest * rules.state_share / (1 + rules.state_share) / each))


def _drafted_tokens(case: Case) -> int:
    """Tokens of a verify step, of which each keeps a state until it is known which are right."""
    return case.speculation.tokens + 1 if case.speculation else 0


def _asked_sequences(case: Case) -> int:
    """Sequences that may run at once as far as the engine is told."""
    rules = rules_of(case)
    return case.question.max_sequences or (rules.drafted_sequences if case.speculation else rules.max_sequences)


def _most_sequences(case: Case, pools: TokenPools, *, states: int, tokens: int, windows: int) -> int:
    """Sequences that may run at once: as asked, and as states and windows allow; at least one where a state fits."""
    rules = rules_of(case)
    bounds = [_asked_sequences(case), max(1, tokens // 2)]
    if pools.sequence_bytes:
        bounds.append(max(1, states // rules.states_per_sequence))
    if pools.window_bytes:
        bounds.append(max(1, windows // (pools.window_tokens + rules.evicted_every)))
    return min(bounds)


def window_parts(case: Case, pool: KVPool) -> tuple[float, float]:
    """Bytes of the pool of windows, and those that the sequences asked about hold of it, one with a chunk under way."""
    rules, pools, ctx_tokens = rules_of(case), token_pools(case), case.question.ctx_tokens
    held = min(ctx_tokens, pools.window_tokens + rules.evicted_every) * case.question.batch
    held += min(max(0, ctx_tokens - pools.window_tokens - rules.evicted_every), case.chunk_tokens)
    return float(pool.window_tokens * pools.window_bytes), float(held * pools.window_bytes)


def _plan(page_bytes: int, page: int) -> BlockPlan:
    """The pool of tokens as one of blocks of a page: all layers are one group."""
    group = Group(kind="attention", layers=1, block_tokens=page, page_bytes=page_bytes, reach_tokens=0, states=0)
    return BlockPlan(block_tokens=page, page_bytes=page_bytes, group_layers=1, groups=(group,))
