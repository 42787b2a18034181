"""How each recorded figure of time, speed or transfer is predicted."""

import math

from msgspec.structs import replace

from calibrate.estimates import (
    Answer,
    Asked,
    Estimate,
    NoAnswer,
    answer,
    count,
    drop,
    of_part,
    of_quantity,
    of_rate,
    scaled,
    within_spread,
)
from calibrate.memory_figures import scanned_bytes
from twin.ask.question import Question
from twin.cost.roofline import Roofs
from twin.operations.counts import sparse_threshold
from twin.prediction import decode_breakdown_of
from twin.units import GB, MIB, MINUTE, MS


def link_rate(asked: Asked) -> Estimate:
    """GB/s from host to device."""
    link = asked.profile.gpu.h2d
    return of_rate(link.rate, GB, naive=link.datasheet.value / GB)


def vram_rate(asked: Asked) -> Estimate:
    """GB/s of VRAM reads."""
    roof = asked.profile.gpu.vram_read
    return of_rate(roof.rate, GB, naive=roof.datasheet.value / GB)


def decode(asked: Asked) -> Estimate:
    """Decode in tokens a second."""
    phase = answer(asked.question, asked.profile).decode
    return of_quantity(phase.tokens_per_s, 1, naive=asked.question.batch / phase.naive_s)


def decode_step(asked: Asked) -> Estimate:
    """A decode step in milliseconds."""
    phase = answer(asked.question, asked.profile).decode
    return of_quantity(phase.seconds, MS, naive=phase.naive_s / MS)


def decode_drop(asked: Asked) -> Estimate:
    """Per cent of decode speed lost from the question set against to the one asked."""
    if asked.against is None:
        raise NoAnswer("a drop needs a question to set it against")
    slower, faster = (answer(question, asked.profile) for question in (asked.question, asked.against))
    return replace(scaled(drop(slower, faster), 100), also=_drop_from_selection(asked, asked.against, slower))


def _drop_from_selection(asked: Asked, against: Question, slower: Answer) -> dict[str, float]:
    """The drop from the shortest step that selects, in place of one that still reads everything."""
    threshold = sparse_threshold(asked.case.model)
    if not against.ctx_tokens < threshold <= asked.question.ctx_tokens:
        return {}
    selecting = answer(replace(against, ctx_tokens=threshold), asked.profile)
    return {"drop_from_a_step_that_selects_percent": 100 * drop(slower, selecting).value}


def decode_link_bytes(asked: Asked) -> Estimate:
    """MiB of cache that one decode step reads from the host."""
    return count(answer(asked.question, asked.profile).decode.link_bytes / MIB)


def decode_gather(asked: Asked) -> Estimate:
    """Milliseconds that the bytes of the selected blocks take in one decode step, latency apart."""
    found = answer(asked.question, asked.profile)
    naive = found.decode.link_bytes / asked.profile.gpu.h2d.datasheet.value
    return of_part(found.decode, "kv_gather", found.prediction.sources, unit=MS, naive=naive / MS)


def pooled_scan(asked: Asked) -> Estimate:
    """Milliseconds of the scan of all pooled keys in one decode step, from where the question keeps them."""
    found, gpu = answer(asked.question, asked.profile), asked.profile.gpu
    peak = gpu.h2d.datasheet if asked.case.pooled == "host" else gpu.vram_read.datasheet
    naive = scanned_bytes(asked) / peak.value
    return of_part(found.decode, "pooled_scan", found.prediction.sources, unit=MS, naive=naive / MS)


def prefill(asked: Asked) -> Estimate:
    """Prefill in prompt tokens a second."""
    phase = answer(asked.question, asked.profile).prefill
    return of_quantity(phase.tokens_per_s, 1, naive=asked.question.batch * asked.question.ctx_tokens / phase.naive_s)


def time_to_context(asked: Asked) -> Estimate:
    """Minutes from nothing to the first token after the asked context."""
    found = answer(asked.question, asked.profile)
    naive = found.prefill.naive_s + found.decode.naive_s
    return of_quantity(found.ttft_s, MINUTE, naive=naive / MINUTE)


def prefill_gather(asked: Asked) -> Estimate:
    """Minutes that the bytes of a prefill's selections take over the link, latency apart."""
    found = answer(asked.question, asked.profile)
    naive = found.prefill.link_bytes / asked.profile.gpu.h2d.datasheet.value
    return of_part(found.prefill, "kv_gather", found.prediction.sources, unit=MINUTE, naive=naive / MINUTE)


def ttft(asked: Asked) -> Estimate:
    """Seconds from nothing, or from what the prefix cache holds, to the first token."""
    found = answer(asked.question, asked.profile)
    return of_quantity(found.ttft_s, 1, naive=found.prefill.naive_s)


def time_per_token(asked: Asked) -> Estimate:
    """Milliseconds of decode a token; under speculation a step over what it yields."""
    rate = answer(asked.question, asked.profile).decode.tokens_per_s
    return Estimate(value=1 / rate.value / MS, low=1 / rate.high / MS, high=1 / rate.low / MS)


def attention_per_layer(asked: Asked) -> Estimate:
    """Milliseconds of one attention layer in a pass of the drafted tokens and one more: a kernel timed alone."""
    case, question, roofs = asked.case, asked.question, Roofs(asked.profile)
    breakdown = decode_breakdown_of(case, roofs, question.ctx_tokens, question.batch)
    part = next((part for part in breakdown.parts() if part.name == "attention"), None)
    if part is None:
        raise NoAnswer("the prediction has no part 'attention'")
    spread = math.sqrt(sum(roofs.rates[rate].spread ** 2 for rate in part.rates))
    naive = question.ctx_tokens * case.plane_bytes / asked.profile.gpu.vram_read.datasheet.value
    return within_spread(part.seconds / case.model.attention_layers / MS, spread, naive=naive / MS)
