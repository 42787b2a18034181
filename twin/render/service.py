"""A served workload with the case that served it, as text and as twin.simulation/1."""

import math
from typing import Any

from twin.answers.service import Service
from twin.render.serving import interval_json, serving_json, serving_text
from twin.serving.traces import Reading
from twin.units import format_bytes


def service_text(service: Service, what: str, reading: Reading | None = None) -> str:
    """What was served by what, and the headline numbers; `reading` is how a trace was read."""
    case, pool = service.case, service.kv_pool
    speculation = case.speculation
    drafted = f", {speculation.drafter.name} drafts {speculation.tokens}" if speculation else ""
    lines = [
        f"{case.model.name} on {service.machine.name}, {case.rules.name}",
        f"{case.fmt.name} cache on {case.backend or case.layout.name}{drafted}; {pool.blocks:,} blocks of "
        f"{pool.plan.block_tokens:,} tokens, at most {service.result.limits.max_sequences:,} sequences, "
        f"{service.result.limits.batched_tokens:,} tokens a step",
        *_no_cache(service),
        *service.notes,
        f"{what}; arrivals {reading.text}" if reading else what,
        "",
    ]
    return "\n".join(lines) + "\n" + serving_text(service.result, service.ends)


def _no_cache(service: Service) -> list[str]:
    """Why nothing can be served, where the pool has not one block for a request."""
    pool, device = service.kv_pool, service.memory.devices()[0]
    if service.result.pool_blocks:
        return []
    if pool.pool_bytes >= pool.plan.block_bytes:
        return [f"no cache fits: {service.memory.shortage()}"]
    taken = sum(size for name, size in device.fixed.items() if name not in ("null block", "state and windows"))
    there, block = format_bytes(device.capacity_bytes), format_bytes(pool.plan.block_bytes)
    return [f"no cache fits: weights and buffers take {format_bytes(taken)} of {there}, a block takes {block}"]


def service_json(service: Service, what: str, reading: Reading | None = None) -> dict[str, Any]:
    """The result with its question and, where three runs were made, the 90 % intervals."""
    case, pool = service.case, service.kv_pool
    question = {
        "model": case.model.name,
        "hw": service.machine.name,
        "engine": case.rules.name,
        "layout": case.layout.name,
        "kv_dtype": case.fmt.name,
        "backend": case.backend or None,
        "workload": what,
        "trace": reading and {"time_unit": reading.time_unit, "hash_tokens": reading.hash_tokens},
        "max_sequences": service.result.limits.max_sequences,
        "batched_tokens": service.result.limits.batched_tokens,
        "max_model_tokens": service.result.limits.max_model_tokens,
        "prefix_caching": service.result.limits.prefix_cache,
        "speculative_tokens": service.result.limits.speculative,
        "tokens_per_step": service.result.limits.tokens_per_step,
    }
    result = serving_json(service.result)
    result["pool"] |= {"kv_pool_tokens": pool.printed_tokens, "block_tokens": pool.plan.block_tokens}
    interval = interval_json(service.ends) if service.fast is not None else None
    return {
        "schema": result.pop("schema"),
        "question": question,
        "notes": list(service.notes),
        **result,
        "interval_90": interval and _known(interval),
    }


def _known(interval: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """The same with null for figures of nothing, such as the time between tokens where every request has one."""
    return {
        figure: {end: value if math.isfinite(value) else None for end, value in ends.items()}
        for figure, ends in interval.items()
    }
