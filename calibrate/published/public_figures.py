"""Figures that public rows have beside the usual ones: what a context, a card or a pass takes by itself."""

from collections.abc import Callable, Iterator

from calibrate.published.estimates import Asked, Estimate, NoAnswer, answer, count, drop, within_spread
from calibrate.published.figures import FIGURES, Figure
from twin.ask.case import Case
from twin.ask.question import Question
from twin.cost.roofline import Roofs
from twin.memory.memory import Memory
from twin.memory.plan import MemoryPlan
from twin.models.mixers import Attending
from twin.operations.ops import Step
from twin.prediction import Z90, chunk_breakdown
from twin.units import GB, GIB


def _whole(case: Case) -> Iterator[tuple[Attending, int]]:
    """Mixers that keep what every token was, and in how many layers."""
    return ((mixer, count) for mixer, count in case.model.caches.items() if mixer.keeps_cache and not mixer.reach)


def _whole_token_bytes(asked: Asked) -> int:
    """K and V of one token in the layers that keep every token."""
    return sum(asked.case.of(mixer).plane_bytes * layers for mixer, layers in _whole(asked.case))


def _whole_bytes(asked: Asked) -> int:
    return _whole_token_bytes(asked) * asked.question.ctx_tokens * asked.question.batch


def _first(plan: MemoryPlan) -> Memory:
    return plan.devices()[0]


def _cache_bytes(plan: MemoryPlan) -> float:
    """What the cache of the asked context takes on the first device."""
    return _first(plan).page_bytes.get("kv cache", 0.0) * plan.pages


def _on_devices(asked: Asked, *parts: str) -> float:
    """Bytes of parts of the asked context over all devices, as the engine keeps them."""
    plan = asked.memory
    return sum(memory.parts(plan.pages).get(part, 0.0) for memory in plan.devices() for part in parts)


def _draft_layers(asked: Asked) -> float:
    """Layers like the model's own that the cache of a drafter's context would fill."""
    one = asked.case.plane_bytes * asked.question.ctx_tokens * asked.question.batch
    return _on_devices(asked, "draft cache") / one


def _heads_per_gpu(asked: Asked) -> float:
    """KV heads of a layer that the first device keeps."""
    plan, case = asked.memory, asked.case
    if case.model.attention is None or not hasattr(case.model.attention, "kv_heads"):
        raise NoAnswer("no layer here has KV heads")
    head = _whole_token_bytes(asked) / case.model.attention.kv_heads
    return _first(plan).page_bytes.get("kv cache", 0.0) / (plan.page_tokens * asked.question.batch) / head


COUNTS: dict[str, tuple[str, Callable[[Asked], float]]] = {
    "kv_of_whole_layers": ("GiB", lambda asked: _whole_bytes(asked) / GIB),
    "states": ("GiB", lambda asked: _on_devices(asked, "recurrent state") / GIB),
    "context_buffer": ("GiB", lambda asked: _on_devices(asked, "kv cache", "recurrent state") / GIB),
    "growing_bytes_per_token": ("B", _whole_token_bytes),
    "kv_elements_of_token": (
        "elements",
        lambda asked: sum(mixer.kv_elements * layers for mixer, layers in asked.case.model.caches.items()),
    ),
    "kv_heads_per_gpu": ("heads", _heads_per_gpu),
    "draft_layers": ("layers", _draft_layers),
    "parameters": ("parameters", lambda asked: sum(asked.case.model.parameters.values())),
    "fits": ("", lambda asked: float(asked.memory.fits)),
}
"""(unit, value) of figures without an interval."""


def _counted(value: Callable[[Asked], float]) -> Callable[[Asked], Estimate]:
    return lambda asked: count(value(asked))


def vram_used(asked: Asked) -> Estimate:
    """All that the asked context takes of VRAM, over all devices."""
    plan = asked.memory
    if not plan.fits:
        raise NoAnswer(f"{asked.question.ctx_tokens:,} tokens do not fit: {plan.shortage()}")
    used = sum(memory.used_bytes(plan.pages) for memory in plan.devices())
    margin = Z90 * sum(memory.capacity_spread for memory in plan.devices())
    return Estimate(value=used / GIB, low=(used - margin) / GIB, high=(used + margin) / GIB)


def kv_pool_bytes(asked: Asked) -> Estimate:
    """What a device of the engine has left for its pool of blocks; naively, all that weights leave."""
    plan = asked.memory
    if plan.kv_pool is None:
        raise NoAnswer(f"{asked.case.rules.name} has no pool of blocks")
    size, device = plan.kv_pool.pool_bytes, _first(plan)
    margin = Z90 * device.capacity_spread
    naive = device.capacity_bytes - device.fixed.get("weights", 0.0) - device.fixed.get("embedding", 0.0)
    return Estimate(value=size / GIB, low=(size - margin) / GIB, high=(size + margin) / GIB, naive=naive / GIB)


def link_write_rate(asked: Asked) -> Estimate:
    """Bytes a second from device to host, as the machine has it."""
    link = asked.machine.gpu.d2h
    return within_spread(link.rate.value / GB, link.rate.spread, naive=link.datasheet.value / GB)


def chunk_speed(asked: Asked) -> Estimate:
    """Tokens a second of one pass of a prompt, behind the asked context."""
    case, roofs = asked.case, Roofs(asked.machine, strict=False)
    step = Step(kv_tokens=asked.question.ctx_tokens, q_tokens=case.chunk_tokens, batch=asked.question.batch)
    found = chunk_breakdown(case, step, roofs)
    tokens = case.chunk_tokens * asked.question.batch
    return within_spread(tokens / found.seconds, found.spread_s(roofs) / found.seconds)


def _against(asked: Asked) -> Question:
    if asked.against is None:
        raise NoAnswer("a figure of two questions needs the other")
    return asked.against


def _other(asked: Asked) -> Asked:
    return Asked(question=_against(asked), profile=asked.profile)


def decode_ratio(asked: Asked) -> Estimate:
    """Decode speed of the asked question as a share of the other's."""
    lost = drop(asked.answer, answer(_against(asked), asked.profile))
    naive = None if lost.naive is None else 1 - lost.naive
    return Estimate(value=1 - lost.value, low=1 - lost.high, high=1 - lost.low, naive=naive)


def vram_difference(asked: Asked) -> Estimate:
    """VRAM that the asked question takes beyond the other, over all devices."""
    return count(vram_used(asked).value - vram_used(_other(asked)).value)


def buffer_growth(asked: Asked) -> Estimate:
    """Buffers of a step on the first device beyond those of the other question."""
    return count((_first(asked.memory).fixed["buffers"] - _first(_other(asked).memory).fixed["buffers"]) / GIB)


def cache_ratio(asked: Asked) -> Estimate:
    """Cache bytes of the asked question on the first device, over those of the other there."""
    return count(_cache_bytes(asked.memory) / _cache_bytes(_other(asked).memory))


PUBLIC_FIGURES: dict[str, Figure] = (
    FIGURES
    | {name: Figure(unit=unit, estimate=_counted(value)) for name, (unit, value) in COUNTS.items()}
    | {
        "vram_used": Figure(unit="GiB", estimate=vram_used),
        "kv_pool_bytes": Figure(unit="GiB", estimate=kv_pool_bytes),
        "link_write_rate": Figure(unit="GB/s", estimate=link_write_rate),
        "chunk_speed": Figure(unit="tok/s", estimate=chunk_speed),
        "decode_ratio": Figure(unit="x", estimate=decode_ratio, paired=True),
        "vram_difference": Figure(unit="GiB", estimate=vram_difference, paired=True),
        "buffer_growth": Figure(unit="GiB", estimate=buffer_growth, paired=True),
        "cache_ratio": Figure(unit="x", estimate=cache_ratio, paired=True),
    }
)
"""All figures, by the name that a public case gives them."""
