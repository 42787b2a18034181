"""What lies in each memory of a machine: a device's layers and their cache, what is kept on the host."""

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.profile import HardwareProfile
from twin.ask.case import Case
from twin.operations.counts import embedding_bytes, head_bytes, layer_parameters, state_bytes, weight_bytes
from twin.operations.lower import split_layers
from twin.units import MAX_TOKENS

PAGE_TABLE_SHARE = 8 / 4096
"""Device bytes per registered host byte: 8 bytes of page table per 4 KiB page, whatever the host's page size.

Measured on one and two H200: 2 MiB per GiB exactly at 8 to 64 GiB, with 4 KiB and with huge pages, on every device
that has a context, whichever registers (`hwprofiles/records/h200/register_cost.json`).
"""


class Pool(Struct, frozen=True, kw_only=True):
    """One memory: what lies in it besides the cache, and what a page of context takes."""

    name: str
    capacity_bytes: float
    fixed: dict[str, float]
    """Bytes by part that do not depend on the context."""
    page_bytes: dict[str, float]
    """Bytes by part that one page of every sequence takes here."""
    capacity_spread: float = 0.0
    """Standard deviation of capacity less fixed parts, in bytes."""
    held_bytes: float = 0.0
    """Bytes that are taken at once, before any context: with a pool of given size all of it."""

    def free_bytes(self) -> float:
        """What the cache may take; negative where even an empty cache does not fit."""
        return self.capacity_bytes - sum(self.fixed.values())

    def parts(self, pages: int) -> dict[str, float]:
        """Bytes by part at that many pages."""
        parts = self.fixed | {name: size * pages for name, size in self.page_bytes.items() if size}
        unused = self.held_bytes - sum(parts.values())
        return parts | {"unused blocks": unused} if unused > 0 else parts

    def used_bytes(self, pages: int) -> float:
        """All bytes at that many pages."""
        return sum(self.parts(pages).values())

    def max_pages(self, *, sigmas: float = 0.0) -> int:
        """Most pages that fit, with the capacity off by so many standard deviations."""
        per_page = sum(self.page_bytes.values())
        more = sigmas * self.capacity_spread
        free = self.free_bytes() + more
        if free < 0 or self.held_bytes > self.capacity_bytes + more:
            return 0
        return int(free // per_page) if per_page else MAX_TOKENS


def one_memory(pools: Sequence[Pool]) -> tuple[Pool, ...]:
    """The same where the host's memory is the device's: its parts take from the last of the device's pools."""
    *others, last, host = pools
    parts = {name: (getattr(last, name), getattr(host, name)) for name in ("fixed", "page_bytes")}
    joined = {
        name: {part: device.get(part, 0.0) + kept.get(part, 0.0) for part in device | kept}
        for name, (device, kept) in parts.items()
    }
    spread = math.hypot(last.capacity_spread, host.capacity_spread)
    return (*others, replace(last, **joined, capacity_spread=spread))


def device_pools(case: Case, profile: HardwareProfile) -> list[Pool]:
    """Each device with its layers' weights, state and cache, under an engine that takes what it needs."""
    devices = split_layers(case, profile.gpu_count)
    kinds = case.model.layer_kinds
    layers = [[kind for at, kind in zip(devices, kinds, strict=True) if at == device] for device in set(devices)]
    fixed = [
        _fixed_parts(case, own, first=device == 0, last=device == len(layers) - 1) for device, own in enumerate(layers)
    ]
    spare = _balanced_workspace(case, profile, layers, fixed)
    page = case.rules.page_tokens * case.question.batch
    placed = case.layout.placement(case)
    tables = page * placed.host_bytes * case.model.attention_layers * PAGE_TABLE_SHARE
    workspace_spread = case.rules.workspace.value * case.rules.workspace.spread
    spread = math.hypot(workspace_spread, profile.gpu.vram.value * profile.gpu.vram.spread)
    return [
        Pool(
            name=f"gpu{device}",
            capacity_bytes=profile.gpu.vram.value,
            fixed=parts | {"workspace": workspace},
            page_bytes={
                "kv cache": own.count("attention") * placed.vram_bytes * page,
                "page tables": tables,
            },
            capacity_spread=spread,
        )
        for device, (own, parts, workspace) in enumerate(zip(layers, fixed, spare, strict=True))
    ]


def _fixed_parts(case: Case, kinds: Sequence[str], *, first: bool, last: bool) -> dict[str, float]:
    """Weights, recurrent state and the layout's buffers on a device with layers of these kinds."""
    model, batch = case.model, case.question.batch
    count = sum(layer_parameters(model, kind) * kinds.count(kind) for kind in set(kinds))
    state = kinds.count("recurrent") * state_bytes(model, case.state_element_bytes) * batch
    weights = weight_bytes(model, count) + (head_bytes(model) if last else 0)
    parts = {"weights": weights, "recurrent state": float(state)}
    if not model.weights.embedding_on_host and kinds:
        parts["embedding"] = float(embedding_bytes(model)) if first else 0.0
    if "attention" in kinds:
        parts |= {name: float(size) for name, size in case.layout.working_bytes(case).items()}
    return {name: size for name, size in parts.items() if size}


def _balanced_workspace(
    case: Case, profile: HardwareProfile, layers: Sequence[Sequence[str]], fixed: list[dict[str, float]]
) -> list[float]:
    """Workspace of each device. Only the total is published; it is spread so that each cache layer has equal room.

    This is what an engine's user reaches by tuning the split by hand (assumption A6): room - workspace is the same per
    cache layer wherever that needs no negative workspace. Devices without cache layers keep their own share.
    """
    share = case.rules.workspace.value
    room = [profile.gpu.vram.value - sum(parts.values()) for parts in fixed]
    caches = [kinds.count("attention") for kinds in layers]
    spread = {device for device, count in enumerate(caches) if count}
    total = share * len(spread)
    while spread:
        level = (sum(room[device] for device in spread) - total) / sum(caches[device] for device in spread)
        below = {device for device in spread if room[device] < level * caches[device]}
        if not below:
            break
        spread -= below
    if not spread or level < 0:
        return [share] * len(layers)
    return [
        room[device] - level * caches[device] if device in spread else (0.0 if caches[device] else share)
        for device in range(len(layers))
    ]


def host_pool(case: Case, profile: HardwareProfile) -> Pool:
    """The host's memory: what is kept there of the model and of the cache."""
    model, batch = case.model, case.question.batch
    fixed = {"reserved": profile.host.reserved.value}
    if model.weights.embedding_on_host:
        fixed["embedding"] = float(embedding_bytes(model))
    if model.ngram is not None and case.ngram == "ram":
        fixed["n-gram table"] = float(model.ngram.table_bytes)
    per_token = case.layout.placement(case).host_bytes * model.attention_layers
    return Pool(
        name="host",
        capacity_bytes=profile.host.memory.value,
        fixed=fixed,
        page_bytes={"kv cache": per_token * case.rules.page_tokens * batch},
        capacity_spread=math.hypot(
            profile.host.reserved.value * profile.host.reserved.spread,
            profile.host.memory.value * profile.host.memory.spread,
        ),
    )
