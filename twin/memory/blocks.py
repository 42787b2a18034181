"""How layers of all types share one pool of blocks, in integers alone: blocks, pages, groups, blocks of a request.

Layers of all types draw blocks from one pool, so that a block of one type must be as long as a block of any other. A
recurrent state of megabytes stretches the attention block to hundreds of tokens, and every group of layers takes whole
blocks of its own. Layers that need the same tokens and differ in bytes alone are one group.

Sources: vLLM 0.26 and 0.28, `v1/core/kv_cache_utils.py` where no file is named; two patches of
syv-ai/qwen38-27b-rtx3090.
"""

from collections import Counter
from collections.abc import Sequence
from math import gcd
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from twin.errors import BadValue, Impossible

LayerKind = Literal["attention", "recurrent", "sliding"]

_BYTES = ("token_bytes", "state_bytes")
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

    block_tokens: int  # tokens in the longest block of attention; without attention of windows, or the shortest block
    page_bytes: int  # bytes of a block in one layer, the same in every group
    group_layers: int  # layers of a full group, g; layers that differ in bytes alone count as one, their pages as one
    groups: tuple[Group, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a page for each layer of a full group (`get_kv_cache_config_from_groups`)."""
        return self.group_layers * self.page_bytes

    @property
    def holds(self) -> str:
        """What a block holds, for a reader."""
        alone = all(group.kind == "recurrent" for group in self.groups)
        tokens = f"{self.block_tokens:,} token{'s' if self.block_tokens > 1 else ''}"
        return "one request's states" if alone else tokens

    @property
    def growing_blocks(self) -> int:
        """Blocks that `block_tokens` more tokens of a long request take: 0 where nothing grows."""
        return sum(_ceil(self.block_tokens, group.block_tokens) for group in self.groups if group.kind == "attention")

    def held_blocks(self, tokens: int) -> int:
        """Blocks of windows and states of a request of that many tokens."""
        return sum(group.blocks(tokens) for group in self.groups if group.kind != "attention")

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


def plan_blocks(specs: Sequence[CacheSpec], settings: PoolSettings) -> BlockPlan:
    """Block, page and groups of layers, alike ones together; Impossible where no such plan is known."""
    layers: Counter[CacheSpec] = Counter()
    for spec in specs:
        layers[replace(spec, layers=1)] += spec.layers
    blocks = _born(_joined([replace(spec, layers=count) for spec, count in layers.items()]))
    blocks = _unified(_promoted(blocks) if settings.promotes_sliding else blocks)
    full = _group_layers([*blocks], balances=settings.balances_groups)
    return BlockPlan(
        block_tokens=_step(blocks),
        page_bytes=_longest_page(blocks),
        group_layers=full,
        groups=tuple(group for spec, tokens in blocks.items() for group in _split(spec, tokens, full, settings)),
    )


def _joined(types: Sequence[CacheSpec]) -> Sequence[CacheSpec]:
    """Layers that need the same tokens of a request are one type, a page of it one of each (`UniformTypeKVCacheSpecs`).

    Attention of all shapes, a compressed cache and its indexer's keys; windows of one length; recurrent states alone.
    """
    if len(types) < 2 or len({(spec.kind, spec.window, spec.kernel_block) for spec in types}) > 1:
        return types
    token_bytes, state_bytes = (sum(getattr(spec, size) * spec.layers for spec in types) for size in _BYTES)
    padded = all(spec.takes_padding for spec in types)
    return [replace(types[0], layers=1, token_bytes=token_bytes, state_bytes=state_bytes, takes_padding=padded)]


def _born(types: Sequence[CacheSpec]) -> _Blocks:
    """Blocks before any is matched to another: the kernel's shortest, a; attention's grows until a page covers a state.

    a * ceil(P / (a t)) tokens for a state of P bytes and t bytes per token, of the attention that has most
    (`interface.py` `_align_hybrid_block_size`).
    """
    blocks = {spec: 0 if spec.kind == "recurrent" else spec.kernel_block for spec in types}
    attention = [spec for spec in types if spec.kind == "attention"]
    state_bytes = max(spec.state_bytes for spec in types)
    if attention and state_bytes:
        most = max(attention, key=lambda spec: spec.token_bytes)
        longer = _ceil(state_bytes, most.kernel_block * most.token_bytes)
        blocks |= {spec: spec.kernel_block * longer for spec in attention}
    return blocks


def _step(blocks: _Blocks) -> int:
    """Tokens by which a request grows: the longest block of attention, else of a window, else the shortest there is."""
    tokens = {kind: max((tokens for spec, tokens in blocks.items() if spec.kind == kind), default=0) for kind in _SIZES}
    return tokens["attention"] or tokens["sliding"] or min(spec.kernel_block for spec in blocks)


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


def _split(spec: CacheSpec, tokens: int, full: int, settings: PoolSettings) -> list[Group]:
    """Groups of at most `full` layers, as even as they go (`layers[i::num_groups]`)."""
    count = _ceil(spec.layers, full)
    in_flight = settings.batched_tokens * (2 if settings.async_scheduling else 1)
    states = settings.speculative_tokens + (2 if settings.prefix_caching else 1)
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
