"""How each recorded figure of memory, context or bytes is predicted."""

import math

from msgspec.structs import replace

from calibrate.estimates import Asked, Estimate, count, of_rate
from calibrate.staging_statistics import staging_statistics
from twin.ask.resolve import resolve
from twin.layouts.offload import naive_read_bytes
from twin.memory.plan import MemoryPlan, plan_memory
from twin.operations.counts import complete_blocks, padded_selection, sparse_threshold
from twin.operations.ops import Step
from twin.prediction import Z90
from twin.units import GIB, KIB, MIB


def vram_total(asked: Asked) -> Estimate:
    """GiB of usable VRAM over all devices."""
    return of_rate(asked.profile.gpu.vram, GIB / asked.profile.gpu_count)


def vram_loaded(asked: Asked) -> Estimate:
    """GiB of weights, state and workspace before any cache."""
    plan = asked.memory
    loaded = sum(sum(pool.fixed.values()) for pool in plan.devices())
    return _bytes(loaded, plan, GIB, naive=_weight_bytes(plan))


def vram_free(asked: Asked) -> Estimate:
    """GiB of VRAM that loading leaves for a cache."""
    plan = asked.memory
    free = sum(pool.free_bytes() for pool in plan.devices())
    return _bytes(free, plan, GIB, naive=_vram_bytes(plan) - _weight_bytes(plan))


def vram_left(asked: Asked) -> Estimate:
    """GiB of VRAM beside weights, state, workspace and the cache of the asked context."""
    plan = asked.memory
    naive = _vram_bytes(plan) - _weight_bytes(plan) - _vram_bytes_per_token(asked) * asked.question.ctx_tokens
    return _bytes(plan.vram_left_bytes(), plan, GIB, naive=naive)


def tokens_of_vram_left(asked: Asked) -> Estimate:
    """Tokens whose VRAM share would fill what the asked context leaves."""
    left, per_token = vram_left(asked), _vram_bytes_per_token(asked) / GIB
    naive = None if left.naive is None else left.naive / per_token
    return Estimate(value=left.value / per_token, low=left.low / per_token, high=left.high / per_token, naive=naive)


def kv_bytes_per_token(asked: Asked) -> Estimate:
    """KiB of cache a token, in all tiers."""
    placed = asked.case.layout.placement(asked.case)
    return count((placed.vram_bytes + placed.host_bytes) * asked.case.model.attention_layers / KIB)


def kv_vram_bytes_per_token(asked: Asked) -> Estimate:
    """KiB of cache a token in VRAM."""
    return count(_vram_bytes_per_token(asked) / KIB)


def kv_host_bytes_per_token(asked: Asked) -> Estimate:
    """KiB of cache a token in host memory."""
    return count(asked.case.layout.placement(asked.case).host_bytes * asked.case.model.attention_layers / KIB)


def max_context(asked: Asked) -> Estimate:
    """Longest context in tokens; naively, what weights leave over bytes a token."""
    plan = asked.memory
    return Estimate(
        value=plan.max_ctx_tokens(),
        low=plan.max_ctx_tokens(sigmas=-Z90),
        high=plan.max_ctx_tokens(sigmas=Z90),
        naive=_naive_max_tokens(plan),
    )


def context_that_fits(asked: Asked) -> Estimate:
    """The asked context in tokens if it fits, or else the longest that does: for a claim that so much fits."""
    plan, claim = asked.memory, asked.question.ctx_tokens
    in_ram = plan_memory(replace(asked.case, ngram="ram"), asked.profile)
    (host,) = in_ram.host()
    return Estimate(
        value=min(claim, plan.max_ctx_tokens()),
        low=min(claim, plan.max_ctx_tokens(sigmas=-Z90)),
        high=min(claim, plan.max_ctx_tokens(sigmas=Z90)),
        naive=min(claim, _naive_max_tokens(plan)),
        also={
            "max_ctx_tokens": plan.max_ctx_tokens(),
            "ngram_in_ram_max_ctx_tokens": in_ram.max_ctx_tokens(),
            "ngram_in_ram_host_used_bytes": host.used_bytes(in_ram.pages),
            "host_capacity_bytes": host.capacity_bytes,
        },
    )


def staging_that_fits(asked: Asked) -> Estimate:
    """The asked staging buffer in MiB if the asked context fits beside it, 0 if not; larger ones beside it."""
    asked_bytes = asked.case.staging_bytes
    also: dict[str, float] = {}
    for times in (1, 2, 4):
        size = asked_bytes * times
        plan = plan_memory(resolve(replace(asked.question, staging_bytes=size)), asked.profile)
        also[f"staging_{size // MIB}_mib_vram_left_bytes"] = plan.vram_left_bytes()
    return count(asked_bytes / MIB if asked.memory.fits else 0.0, also=also)


def context_read_whole(asked: Asked) -> Estimate:
    """Longest context in tokens that attention reads whole."""
    return count(sparse_threshold(asked.case.model))


def native_context(asked: Asked) -> Estimate:
    """Longest context in tokens that needs no rope scaling."""
    return count(asked.case.model.native_ctx_tokens)


def pooled_scan_bytes(asked: Asked) -> Estimate:
    """MiB of pooled keys that one decode step scans, over all layers."""
    return count(scanned_bytes(asked) / MIB)


def scanned_bytes(asked: Asked) -> int:
    """Bytes of the pooled keys of all complete blocks when the asked decode step runs, over all layers."""
    model = asked.case.model
    return complete_blocks(model, asked.question.ctx_tokens + 1) * asked.case.index_key_bytes * model.attention_layers


def naive_chunk_bytes(asked: Asked) -> Estimate:
    """GiB that the last full chunk of the asked context reads if each row fetches its own selection."""
    case, rows = asked.case, asked.case.chunk_tokens
    chunk = Step(kv_tokens=(asked.question.ctx_tokens // rows - 1) * rows, q_tokens=rows)
    layers = case.model.attention_layers
    padded = rows * padded_selection(case.model, case.rules.sparse.selection_alignment) * case.plane_bytes
    return count(naive_read_bytes(case, chunk) * layers / GIB, also={"padded_selections_bytes": padded * layers})


def staged_ratio(asked: Asked) -> Estimate:
    """How many times fewer bytes cross the link when staged, as the engine's statistics count; the prompt is `ctx`.

    The cache is the model's native context, which the figure's source loads (-cs 262144).
    """
    statistics = staging_statistics(
        asked.case, prompt_tokens=asked.question.ctx_tokens, cache_tokens=asked.case.model.native_ctx_tokens
    )
    return count(statistics.ratio, also={"without_probe_ratio": statistics.ratio_without_probe})


def _bytes(size: float, plan: MemoryPlan, unit: float, *, naive: float) -> Estimate:
    """An amount of VRAM over all devices; their workspace is one number, so their errors add up."""
    margin = Z90 * sum(pool.capacity_spread for pool in plan.devices())
    return Estimate(value=size / unit, low=(size - margin) / unit, high=(size + margin) / unit, naive=naive / unit)


def _vram_bytes(plan: MemoryPlan) -> float:
    return sum(pool.capacity_bytes for pool in plan.devices())


def _weight_bytes(plan: MemoryPlan) -> float:
    return sum(pool.fixed.get("weights", 0.0) for pool in plan.devices())


def _vram_bytes_per_token(asked: Asked) -> int:
    return asked.case.layout.placement(asked.case).vram_bytes * asked.case.model.attention_layers


def _naive_max_tokens(plan: MemoryPlan) -> float:
    """Capacity less weights over cache bytes a token, tier by tier: no state, no workspace, no rounding."""
    longest = math.inf
    for pools in (plan.devices(), plan.host()):
        per_token = sum(pool.page_bytes.get("kv cache", 0.0) for pool in pools) / plan.page_tokens
        room = sum(pool.capacity_bytes - pool.fixed.get("weights", 0.0) for pool in pools)
        longest = min(longest, room / per_token if per_token else math.inf)
    return longest
