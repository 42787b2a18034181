"""Does it fit, and how far does the context go: bytes of every part against every memory of the machine."""

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.profile import HardwareProfile
from twin.ask.case import Case
from twin.errors import Impossible
from twin.layouts import Placement
from twin.memory.block_pool import KVPool, plan_pool, pool_stages, scratch_token_bytes, share_bytes
from twin.memory.cells import cell_memories
from twin.memory.memory import Memory, head_bytes
from twin.memory.startup import pool_rules
from twin.memory.tensors import tensor_parts
from twin.memory.token_pool import outside_bytes, plan_token_pool, static_bytes, token_pools, window_parts
from twin.operations.counts import state_bytes
from twin.operations.lower import offloaded_bytes, split_layers
from twin.units import MAX_TOKENS, format_bytes

PAGE_TABLE_SHARE = 8 / 4096
"""Device bytes per registered host byte: 8 bytes of page table per 4 KiB page, whatever the host's page size.

Measured on one and two H200: 2 MiB per GiB exactly at 8 to 64 GiB, with 4 KiB and with huge pages, on every device
that has a context, whichever registers (`hwprofiles/records/h200/register_cost.json`).
"""


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Every memory of a machine under one case."""

    case: Case
    machine: HardwareProfile
    memories: tuple[Memory, ...]
    pages: int
    page_tokens: int
    kv_pool: KVPool | None = None  # the pool of blocks, under an engine that shares one among requests

    @property
    def fits(self) -> bool:
        """Whether every memory holds the asked context."""
        return not self.short()

    def short(self) -> list[Memory]:
        """Memories that do not hold it."""
        return [memory for memory in self.memories if memory.max_pages() < self.pages]

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
        pages = min(memory.max_pages(sigmas=sigmas) for memory in self.memories)
        return min(pages * self.page_tokens, MAX_TOKENS)

    def limit(self) -> Memory:
        """The memory that ends the context first."""
        return min(self._told(self.max_ctx_tokens()).memories, key=lambda memory: memory.max_pages())

    def shortage(self) -> str:
        """What is needed against what is there, tier by tier; empty where it fits."""
        lines, short = [], self.short()
        for tier, memories in self.tiers():
            needed = sum(memory.used_bytes(self.pages) for memory in memories)
            there = sum(memory.capacity_bytes for memory in memories)
            if needed > there:
                lines.append(_short(tier, needed, "the machine", there))
            else:
                lines += [
                    _short(f"{tier} on {memory.name}", memory.used_bytes(self.pages), "which", memory.capacity_bytes)
                    for memory in memories
                    if memory in short
                ]
        return "; ".join(lines)

    @property
    def token_bytes(self) -> Placement:
        """Cache bytes of one token of a short context, in each memory tier, over all devices."""
        kinds, cpu_layers, ranks = self.case.model.layer_kinds, self.case.cpu_layers, self.case.tp
        placed, kept = placement_of(self.case, kinds[cpu_layers:]), placement_of(self.case, kinds[:cpu_layers])
        on_host = placed.host_bytes + kept.vram_bytes + kept.host_bytes
        return Placement(vram_bytes=placed.vram_bytes * ranks, host_bytes=on_host * ranks)

    @property
    def unified(self) -> bool:
        """Whether device and host take from one memory."""
        return self.machine.gpu.shares_memory

    def tiers(self) -> list[tuple[str, list[Memory]]]:
        """Memories by what people call them: of VRAM and of the host, or the one memory of both."""
        if self.unified:
            return [("memory", self.devices())]
        return [("VRAM", self.devices()), ("host memory", self.host())]

    def devices(self) -> list[Memory]:
        """Those of VRAM, or of a memory that is the host's too."""
        return [memory for memory in self.memories if memory.name != "host"]

    def host(self) -> list[Memory]:
        """That of the host, as a list of one; empty where the device's is the host's."""
        return [memory for memory in self.memories if memory.name == "host"]

    def vram_left_bytes(self) -> float:
        """VRAM that the plan leaves free over all devices; a device that is short leaves nothing."""
        return sum(max(0.0, memory.capacity_bytes - memory.used_bytes(self.pages)) for memory in self.devices())


def _short(what: str, needed: float, who: str, there: float) -> str:
    missing = format_bytes(math.ceil(needed - there))
    return f"needs {format_bytes(needed)} of {what}, {who} has {format_bytes(there)} ({missing} short)"


def plan_memory(case: Case, profile: HardwareProfile) -> MemoryPlan:
    """Lay the case's weights, state, workspace and cache over the machine's memories."""
    if case.rules.shares_pool:
        return _shared_pool_plan(case, profile)
    page_tokens = case.rules.page_tokens
    pages = -(-case.question.ctx_tokens // page_tokens)
    if case.rules.cells is not None:
        memories = _memories(profile, *cell_memories(case, profile))
    else:
        memories = _memories(profile, *device_memories(case, profile), host_memory(case, profile))
    return MemoryPlan(case=case, machine=profile, memories=memories, pages=pages, page_tokens=page_tokens)


def _shared_pool_plan(case: Case, profile: HardwareProfile) -> MemoryPlan:
    """Devices whose engine keeps a share of each: blocks in that share, scratch that grows in the rest.

    A pool of given size takes the place of that share and is taken whole. A page is a block of attention in each of
    its groups. A model's windows are counted as far as the context fills them, those of a drafter alone in full. Ranks
    of a stage are alike; of several stages the one with the fewest tokens says what the engine prints.
    """
    if profile.devices:
        raise Impossible(f"{case.rules.name} is modelled on devices of one kind, not on {profile.name}")
    stages = pool_stages(case, case.stages(profile.gpu_count))
    planner = plan_token_pool if case.rules.token_pool else plan_pool
    planned = [planner(stage, profile) for stage in stages]
    kv_pool = min((pool for pool, _, _ in planned), key=lambda pool: pool.printed_tokens)
    page_tokens = max(pool.plan.block_tokens for pool, _, _ in planned)
    memories: list[Memory] = []
    for index in range(profile.gpu_count):
        stage = index // case.tp
        memories += _pool_device(stages[stage], profile, *planned[stage], name=f"gpu{index}", page_tokens=page_tokens)
    joined = _memories(profile, *memories, host_memory(case, profile))
    if any(memory.free_bytes() < 0 for memory in joined if memory.name not in _in_share(profile)):
        kv_pool = replace(kv_pool, blocks=0)  # the engine does not start: there are no blocks
    pages = -(-case.question.ctx_tokens // page_tokens)
    return MemoryPlan(
        case=case, machine=profile, memories=joined, pages=pages, page_tokens=page_tokens, kv_pool=kv_pool
    )


def _in_share(profile: HardwareProfile) -> set[str]:
    """Memories that hold blocks; where the host's is the device's, the last of them is what lies outside."""
    return {f"gpu{index}" for index in range(profile.gpu_count)}


def _pool_device(
    case: Case,
    profile: HardwareProfile,
    kv_pool: KVPool,
    parts: dict[str, float],
    spread: float,
    *,
    name: str,
    page_tokens: int,
) -> tuple[Memory, ...]:
    """The engine's share of one device, that of windows where they have a pool of their own, and what is outside."""
    tokens = case.rules.token_pool
    plan, batch = kv_pool.plan, case.question.batch
    windows = any(mixer.reach for mixer in case.model.caches)
    held = plan.held_blocks(case.question.ctx_tokens if windows else MAX_TOKENS)
    nobodys = float(kv_pool.null_blocks * plan.block_bytes)
    fixed = parts | {"null block": nobodys, "state and windows": float(held * plan.block_bytes * batch)}
    capacity, taken = static_bytes(case, profile) if tokens else share_bytes(case, profile), 0.0
    if case.question.pool_bytes is not None:
        taken = sum(parts.values()) + kv_pool.pool_bytes
        capacity = min(taken, profile.gpu.vram.value)
    outside = max(0.0, profile.gpu.vram.value - capacity)
    untracked = tokens.context if tokens else pool_rules(case).untracked
    grown = plan.growing_blocks * plan.block_bytes * batch * (page_tokens / plan.block_tokens)
    device = Memory(
        name=name,
        capacity_bytes=capacity,
        fixed={part: size for part, size in fixed.items() if size},
        page_bytes={"kv cache": float(grown)},
        capacity_spread=spread,
        held_bytes=taken,
    )
    context = outside_bytes(case, profile) if tokens else untracked.value
    kept = {"context": min(context, outside), "page tables": offload_bytes(case) * PAGE_TABLE_SHARE}
    headroom = Memory(
        name=f"{name} outside the engine's share",
        capacity_bytes=outside,
        fixed={name: size for name, size in kept.items() if size or name == "context"},
        page_bytes={"prefill scratch": 0.0 if tokens else scratch_token_bytes(case) * page_tokens},
        capacity_spread=untracked.deviation,
    )
    return (*(_apart(device, case, kv_pool) if kv_pool.window_tokens else (device,)), headroom)


def _apart(device: Memory, case: Case, kv_pool: KVPool) -> tuple[Memory, Memory]:
    """The device without the pool that windows have of their own, and that pool."""
    pool_bytes, held_bytes = window_parts(case, kv_pool)
    page_bytes = float(token_pools(case).token_bytes * kv_pool.plan.block_tokens * case.question.batch)
    left = replace(
        device,
        capacity_bytes=device.capacity_bytes - pool_bytes,
        page_bytes={"kv cache": page_bytes},
        held_bytes=max(0.0, device.held_bytes - pool_bytes),
    )
    return left, Memory(
        name=f"{device.name} windows", capacity_bytes=pool_bytes, fixed={"windows": held_bytes}, page_bytes={}
    )


def _memories(profile: HardwareProfile, *memories: Memory) -> tuple[Memory, ...]:
    """As they are; where the host's memory is the device's, its parts take from the last of the device's."""
    if not profile.gpu.shares_memory:
        return memories
    *others, last, host = memories

    def joined(device: dict[str, float], kept: dict[str, float]) -> dict[str, float]:
        return {part: device.get(part, 0.0) + kept.get(part, 0.0) for part in device | kept}

    spread, pages = math.hypot(last.capacity_spread, host.capacity_spread), joined(last.page_bytes, host.page_bytes)
    both = replace(last, fixed=joined(last.fixed, host.fixed), page_bytes=pages, capacity_spread=spread)
    return (*others, both)


def device_memories(case: Case, profile: HardwareProfile) -> list[Memory]:
    """Each device with its layers' weights, state and cache, under an engine that takes what it needs.

    Ranks that share a stage's layers are alike.
    """
    devices = split_layers(case.model.layers, profile.stages(case.tp))
    kinds = case.model.layer_kinds
    layers = [[kind for at, kind in zip(devices, kinds, strict=True) if at == device] for device in set(devices)]
    fixed = [
        _fixed_parts(case, own, first=device == 0, last=device == len(layers) - 1) for device, own in enumerate(layers)
    ]
    placed = [placement_of(case, own) for own in layers]
    spare = _balanced_workspace(case, profile, [place.vram_bytes + place.host_bytes for place in placed], fixed)
    page = case.rules.page_tokens * case.question.batch
    tables = page * sum(place.host_bytes for place in placed) * PAGE_TABLE_SHARE
    vram = [profile.gpu_of(device * case.tp).vram for device in range(len(layers))]
    return [
        Memory(
            name=f"gpu{device * case.tp + rank}",
            capacity_bytes=vram[device].value,
            fixed=parts | {"workspace": workspace},
            page_bytes={"kv cache": place.vram_bytes * page, "page tables": tables},
            capacity_spread=math.hypot(case.rules.workspace.deviation, vram[device].deviation),
        )
        for device, (place, parts, workspace) in enumerate(zip(placed, fixed, spare, strict=True))
        for rank in range(case.tp)
    ]


def placement_of(case: Case, kinds: Sequence[str]) -> Placement:
    """Cache bytes of one token in all these layers that grow with every token.

    What a window no longer sees is kept, unless the engine keeps windows no longer than they see.
    """
    mixers = (mixer for kind in kinds for mixer in case.model.kinds[kind].attending if mixer.keeps_cache)
    if case.rules.tensor_cache is not None:
        mixers = (mixer for mixer in mixers if not mixer.reach)
    placed = [(own := case.of(mixer)).layout.placement(own) for mixer in mixers]
    return Placement(
        vram_bytes=sum(place.vram_bytes for place in placed), host_bytes=sum(place.host_bytes for place in placed)
    )


def _fixed_parts(case: Case, kinds: Sequence[str], *, first: bool, last: bool) -> dict[str, float]:
    """Weights, recurrent state and the layout's buffers on a device with layers of these kinds."""
    model, rules = case.model, case.rules
    layers = [(model.kinds[kind], kinds.count(kind)) for kind in dict.fromkeys(kinds)]
    weights = sum(model.stored_bytes(layer.parameters(model.hidden)) * count for layer, count in layers)
    if last:
        weights += head_bytes(case)
    state = sum(
        state_bytes(mixer, case.state_bytes_of(mixer)) * count for layer, count in layers for mixer in layer.recurrent
    )
    parts = {"weights": weights, "recurrent state": float(state * case.question.batch)}
    if not rules.embedding_on_host and kinds:
        parts["embedding"] = model.weight_bytes["embedding"] if first else 0.0
    if rules.tensor_cache is not None:
        parts |= tensor_parts(case, layers)
    if any(layer.attending for layer, _ in layers):
        parts |= {name: float(size) for name, size in case.layout.working_bytes(case).items()}
    return {name: size for name, size in parts.items() if size}


def _balanced_workspace(
    case: Case, profile: HardwareProfile, caches: Sequence[float], fixed: list[dict[str, float]]
) -> list[float]:
    """Workspace of each device. Only the total is published; it is spread so that each cache layer has equal room.

    This is what an engine's user reaches by tuning the split by hand (assumption A6): room - workspace is the same per
    cache byte of a token wherever that needs no negative workspace. Devices without a cache keep their own share.
    """
    divided = case.rules.shared_workspace
    share = case.rules.workspace.value * (1 - divided + divided / case.tp)
    room = [profile.gpu_of(at * case.tp).vram.value - sum(parts.values()) for at, parts in enumerate(fixed)]
    spread = {device for device, count in enumerate(caches) if count}
    total = share * len(spread)
    while spread:
        level = (sum(room[device] for device in spread) - total) / sum(caches[device] for device in spread)
        below = {device for device in spread if room[device] < level * caches[device]}
        if not below:
            break
        spread -= below
    if not spread or level < 0:
        return [share] * len(caches)
    return [
        room[device] - level * caches[device] if device in spread else (0.0 if caches[device] else share)
        for device in range(len(caches))
    ]


def offload_bytes(case: Case) -> float:
    """Bytes of registered host memory for blocks that the pool gave up: as asked, or what is asked to lie there."""
    question = case.question
    if question.offload_bytes is not None or question.cached_in != "host":
        return float(question.offload_bytes or 0)
    found = sum(offloaded_bytes(case.of(mixer)) * layers for mixer, layers in case.model.caches.items())
    return found * question.batch * case.tp


def host_memory(case: Case, profile: HardwareProfile) -> Memory:
    """The host's memory: what is kept there of the model and of the cache."""
    model, batch = case.model, case.question.batch
    fixed = {"reserved": profile.host.reserved.value}
    if case.rules.embedding_on_host:
        fixed["embedding"] = model.weight_bytes["embedding"] * case.tp
    if model.ngram is not None and case.ngram == "ram":
        fixed["n-gram table"] = float(model.ngram.table_bytes)
    if offloaded := offload_bytes(case):
        fixed["offloaded cache"] = offloaded
    per_token = placement_of(case, model.layer_kinds).host_bytes * case.tp
    return Memory(
        name="host",
        capacity_bytes=profile.host.memory.value,
        fixed=fixed,
        page_bytes={"kv cache": per_token * case.rules.page_tokens * batch},
        capacity_spread=math.hypot(profile.host.reserved.deviation, profile.host.memory.deviation),
    )
