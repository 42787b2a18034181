"""Does it fit, and how far does the context go: bytes of every part against every memory of the machine."""

import math

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.profile import HardwareProfile
from twin.ask.case import Case
from twin.errors import Impossible
from twin.memory.placed import Pool, device_pools, host_pool, one_memory
from twin.memory.pool import KVPool, plan_pool, pool_rules, scratch_token_bytes, share_bytes
from twin.units import MAX_TOKENS, format_bytes


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Every memory of a machine under one case."""

    case: Case
    machine: HardwareProfile
    pools: tuple[Pool, ...]
    pages: int
    page_tokens: int
    kv_pool: KVPool | None = None
    """The pool of blocks, under an engine that shares one among requests."""

    @property
    def fits(self) -> bool:
        """Whether every pool holds the asked context."""
        return not self.short()

    def short(self) -> list[Pool]:
        """Pools that do not hold it."""
        return [pool for pool in self.pools if pool.max_pages() < self.pages]

    def max_ctx_tokens(self, *, sigmas: float = 0.0) -> int:
        """Longest context of each sequence that fits if it is asked for, whatever was; 0 if no page does.

        Whole pages, unless buffers end it, and at most all that a question may ask for. An engine that is told no
        longest request sizes buffers for the context asked about: the longer that is, the less they leave. So the
        context is sought for which they leave just enough.
        """
        high = self._told(1)._left_tokens(sigmas)
        low = self._told(high)._left_tokens(sigmas)
        while low < high:
            middle = (low + high + 1) // 2
            if self._told(middle)._left_tokens(sigmas) >= middle:
                low = middle
            else:
                high = middle - 1
        return low

    def _told(self, ctx_tokens: int) -> "MemoryPlan":
        """The plan of the same question about another context."""
        question = replace(self.case.question, ctx_tokens=max(1, ctx_tokens))
        return plan_memory(replace(self.case, question=question), self.machine)

    def _left_tokens(self, sigmas: float) -> int:
        """Most tokens of each sequence beside buffers as they are sized here."""
        pages = min(pool.max_pages(sigmas=sigmas) for pool in self.pools)
        return min(pages * self.page_tokens, MAX_TOKENS)

    def limit(self) -> Pool:
        """The pool that ends the context first."""
        return min(self._told(self.max_ctx_tokens()).pools, key=lambda pool: pool.max_pages())

    def shortage(self) -> str:
        """What is needed against what is there, tier by tier; empty where it fits."""
        lines, short = [], self.short()
        for tier, pools in self.tiers():
            needed = sum(pool.used_bytes(self.pages) for pool in pools)
            there = sum(pool.capacity_bytes for pool in pools)
            if needed > there:
                lines.append(_short(tier, needed, "the machine", there))
            else:
                lines += [
                    _short(f"{tier} on {pool.name}", pool.used_bytes(self.pages), "which", pool.capacity_bytes)
                    for pool in pools
                    if pool in short
                ]
        return "; ".join(lines)

    @property
    def unified(self) -> bool:
        """Whether device and host take from one memory."""
        return self.machine.gpu.shares_memory

    def tiers(self) -> list[tuple[str, list[Pool]]]:
        """The pools of VRAM and that of the host by what people call them, or those of the one memory."""
        if self.unified:
            return [("memory", self.devices())]
        return [("VRAM", self.devices()), ("host memory", self.host())]

    def devices(self) -> list[Pool]:
        """The pools of VRAM, or of a memory that is the host's too."""
        return [pool for pool in self.pools if pool.name != "host"]

    def host(self) -> list[Pool]:
        """The pool of host memory, as a list of one; empty where the device's is the host's."""
        return [pool for pool in self.pools if pool.name == "host"]

    def vram_left_bytes(self) -> float:
        """VRAM that the plan leaves free over all devices; a device that is short leaves nothing."""
        return sum(max(0.0, pool.capacity_bytes - pool.used_bytes(self.pages)) for pool in self.devices())


def _short(what: str, needed: float, who: str, there: float) -> str:
    missing = format_bytes(math.ceil(needed - there))
    return f"needs {format_bytes(needed)} of {what}, {who} has {format_bytes(there)} ({missing} short)"


def plan_memory(case: Case, profile: HardwareProfile) -> MemoryPlan:
    """Lay the case's weights, state, workspace and cache over the machine's memories."""
    if case.rules.block_pool is not None:
        return _shared_pool_plan(case, profile)
    page_tokens = case.rules.page_tokens
    pages = -(-case.question.ctx_tokens // page_tokens)
    pools = _held_apart((*device_pools(case, profile), host_pool(case, profile)), profile)
    return MemoryPlan(case=case, machine=profile, pools=pools, pages=pages, page_tokens=page_tokens)


def _held_apart(pools: tuple[Pool, ...], profile: HardwareProfile) -> tuple[Pool, ...]:
    return one_memory(pools) if profile.gpu.shares_memory else pools


def _shared_pool_plan(case: Case, profile: HardwareProfile) -> MemoryPlan:
    """One device whose engine keeps a share of it: blocks in that share, scratch that grows in the rest.

    A pool of given size takes the place of that share and is taken whole. A page is a block of attention in each of
    its groups. A drafter's windows are counted full, whatever the context.
    """
    if profile.gpu_count > 1:
        raise Impossible(
            f"{case.rules.name} is modelled on one device, {profile.name} has {profile.gpu_count}",
            hint="name a machine with one, such as --hw rtx3090 or --hw h200",
        )
    kv_pool, parts, spread = plan_pool(case, profile)
    plan, batch = kv_pool.plan, case.question.batch
    attention = sum(group.kind == "attention" for group in plan.groups)
    held = plan.blocks_per_request(MAX_TOKENS) - attention * -(-MAX_TOKENS // plan.block_tokens)
    null_block = plan.block_bytes
    fixed = parts | {"null block": float(null_block), "state and windows": float(held * plan.block_bytes * batch)}
    capacity, taken = share_bytes(case, profile), 0.0
    if case.question.pool_bytes is not None:
        taken = sum(parts.values()) + kv_pool.pool_bytes
        capacity = min(taken, profile.gpu.vram.value)
    outside, untracked = profile.gpu.vram.value - capacity, pool_rules(case).untracked
    device = Pool(
        name="gpu0",
        capacity_bytes=capacity,
        fixed={name: size for name, size in fixed.items() if size},
        page_bytes={"kv cache": float(attention * plan.block_bytes * batch)},
        capacity_spread=spread,
        held_bytes=taken,
    )
    headroom = Pool(
        name="gpu0 outside the engine's share",
        capacity_bytes=outside,
        fixed={"context": min(untracked.value, outside)},
        page_bytes={"prefill scratch": scratch_token_bytes(case) * plan.block_tokens},
        capacity_spread=untracked.value * untracked.spread,
    )
    pages = -(-case.question.ctx_tokens // plan.block_tokens)
    pools = _held_apart((device, headroom, host_pool(case, profile)), profile)
    if any(pool.free_bytes() < 0 for pool in pools[1:]):  # the engine does not start: there are no blocks
        kv_pool = replace(kv_pool, blocks=0)
    return MemoryPlan(
        case=case, machine=profile, pools=pools, pages=pages, page_tokens=plan.block_tokens, kv_pool=kv_pool
    )
