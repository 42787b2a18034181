"""Every figure that can be predicted, by the name that a case gives it: its unit, and how the twin estimates it."""

import math
from collections.abc import Callable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from calibrate.published.estimates import Answer, Asked, Estimate, NoAnswer, answer, count, drop, of_part, within_spread
from hwprofiles.profile import Gpu, Link, Roof
from twin.answers.service import Service, serve
from twin.ask.question import Question
from twin.ask.resolve import check_capability, resolve
from twin.cost.prefill import chunk_at, chunk_count
from twin.cost.roofline import Roofs
from twin.errors import BadValue, Impossible
from twin.layouts.offload import naive_read_bytes
from twin.memory.block_pool import KVPool
from twin.memory.blocks import Group
from twin.memory.plan import MemoryPlan, plan_memory
from twin.operations.counts import complete_blocks, is_sparse, padded_selection
from twin.operations.ops import Step
from twin.prediction import Z90, Phase, Quantity, decode_breakdown_of
from twin.serving.metrics import ServingResult
from twin.serving.requests import Lengths, Workload
from twin.units import GB, GIB, KIB, MIB, MINUTE, MS

Estimator = Callable[[Asked], Estimate]


class Figure(Struct, frozen=True, kw_only=True):
    """One predictable figure."""

    unit: str
    estimate: Estimator
    paired: bool = False
    """Whether it sets one question against another."""
    served: bool = False
    """Whether it is of many requests, so that a case gives a workload."""


FIGURES: dict[str, Figure] = {}


def _figure(unit: str, *, paired: bool = False) -> Callable[[Estimator], Estimator]:
    """Enter a function in FIGURES under its own name."""

    def entered(estimate: Estimator) -> Estimator:
        FIGURES[estimate.__name__] = Figure(unit=unit, estimate=estimate, paired=paired)
        return estimate

    return entered


# Counts: what follows from shapes and memory alone.


def _scanned_bytes(asked: Asked) -> int:
    """Bytes of the pooled keys of all complete blocks when the asked decode step runs, over all layers."""
    model = asked.case.model
    return (
        complete_blocks(asked.case.indexer, asked.question.ctx_tokens + 1)
        * asked.case.index_key_bytes
        * model.attention_layers
    )


def _threshold(asked: Asked) -> int:
    """The longest context that is still read whole; 0 where all of it always is."""
    indexer = asked.case.indexer
    return indexer.threshold_tokens if indexer else 0


def _vram_bytes_per_token(asked: Asked) -> int:
    return asked.memory.token_bytes.vram_bytes


def _host_bytes_per_token(asked: Asked) -> int:
    return asked.memory.token_bytes.host_bytes


def _pool(asked: Asked) -> KVPool:
    pool = asked.memory.kv_pool
    if pool is None:
        raise Impossible("this engine has no pool of blocks")
    return pool


def _windows(asked: Asked) -> list[Group]:
    return [group for group in _pool(asked).plan.groups if group.kind == "sliding"]


def _window(asked: Asked) -> Group:
    """A group of sliding layers."""
    for group in _windows(asked):
        return group
    raise NoAnswer("no layer here has a sliding window")


def _starts(asked: Asked) -> bool:
    """Whether the engine's kernels start on the device, or refuse."""
    try:
        check_capability(asked.case, asked.profile)
    except Impossible:
        return False
    return True


COUNTS: dict[str, tuple[str, Callable[[Asked], float]]] = {
    # K and V of one token in one attention layer, in all of them, with what a layout keeps beside them, by tier
    "kv_bytes_per_token_per_layer": ("B", lambda asked: asked.case.plane_bytes),
    "kv_bytes_of_token": ("B", lambda asked: asked.case.plane_bytes * asked.case.model.attention_layers),
    "kv_bytes_per_token": ("KiB", lambda asked: (_vram_bytes_per_token(asked) + _host_bytes_per_token(asked)) / KIB),
    "kv_vram_bytes_per_token": ("KiB", lambda asked: _vram_bytes_per_token(asked) / KIB),
    "kv_host_bytes_per_token": ("KiB", lambda asked: _host_bytes_per_token(asked) / KIB),
    # the longest contexts that attention reads whole, and that need no rope scaling
    "context_read_whole": ("tokens", _threshold),
    "native_context": ("tokens", lambda asked: asked.case.model.native_ctx_tokens),
    # what a decode step reads of pooled keys in all layers, and from the host
    "pooled_scan_bytes": ("MiB", lambda asked: _scanned_bytes(asked) / MIB),
    "decode_link_bytes": ("MiB", lambda asked: asked.answer.decode.link_bytes / MIB),
    # an attention block, and one layer's share of it
    "block_tokens": ("tokens", lambda asked: _pool(asked).plan.block_tokens),
    "page": ("MiB", lambda asked: _pool(asked).plan.page_bytes / MIB),
    # blocks of one request's sliding windows; how much of a page such a block fills, and its tokens
    "window_blocks": (
        "blocks",
        lambda asked: sum(group.blocks(asked.question.ctx_tokens) for group in _windows(asked)),
    ),
    "window_page_use": ("%", lambda asked: 100 * _window(asked).page_bytes / _pool(asked).plan.page_bytes),
    "window_block_tokens": ("tokens", lambda asked: _window(asked).block_tokens),
    # what one request of the asked context takes of the pool
    "kv_memory": ("GiB", lambda asked: _pool(asked).plan.bytes_per_request(asked.question.ctx_tokens) / GIB),
    # 1 for yes, 0 for no
    "runs_out_of_memory": ("", lambda asked: 0.0 if asked.memory.fits else 1.0),
    "starts": ("", lambda asked: float(_starts(asked))),
}
"""(unit, value) of figures without an interval."""


def _of_count(value: Callable[[Asked], float], asked: Asked) -> Estimate:
    return count(value(asked))


FIGURES |= {name: Figure(unit=unit, estimate=partial(_of_count, value)) for name, (unit, value) in COUNTS.items()}


@_figure("GiB")
def naive_chunk_bytes(asked: Asked) -> Estimate:
    """What the last full chunk of the asked context reads if each of its tokens fetches its own selection."""
    case, q_tokens = asked.case, asked.case.chunk_tokens
    chunk = Step(kv_tokens=(asked.question.ctx_tokens // q_tokens - 1) * q_tokens, q_tokens=q_tokens)
    layers = case.model.attention_layers
    padded = q_tokens * padded_selection(case.indexer, case.rules.sparse.selection_alignment) * case.plane_bytes
    return count(naive_read_bytes(case, chunk) * layers / GIB, also={"padded_selections_bytes": padded * layers})


@_figure("MiB")
def staging_that_fits(asked: Asked) -> Estimate:
    """The asked staging buffer if the asked context fits beside it, 0 if not; larger ones beside it."""
    asked_bytes = asked.case.staging_bytes
    also: dict[str, float] = {}
    for times in (1, 2, 4):
        size = asked_bytes * times
        plan = plan_memory(resolve(replace(asked.question, staging_bytes=size)), asked.profile)
        also[f"staging_{size // MIB}_mib_vram_left_bytes"] = plan.vram_left_bytes()
    return count(asked_bytes / MIB if asked.memory.fits else 0.0, also=also)


@_figure("x")
def staged_ratio(asked: Asked) -> Estimate:
    """How many times fewer bytes cross the link when a prompt of the asked context is staged. BadValue where it is not.

    exllamav3's KV-offload port prints it with EXL3_QSA_KVO_STATS=1 (`util/qsa_kvo_stats.py`): query tokens x padded
    selection over tokens of the pages copied, where a page counts once for each chunk that reads it. It counts from the
    moment of loading, so a probe that the loader runs through each layer at the end of the full cache is in it
    (`Attention.autosplit_extra_measure`): one chunk, every page. The cache is the model's native context, which the
    figure's source loads (-cs 262144).
    """
    case, rules, prompt_tokens = asked.case, asked.case.rules, asked.question.ctx_tokens
    chunks = [chunk_at(case, prompt_tokens, index) for index in range(chunk_count(case, prompt_tokens))]
    staged = [chunk for chunk in chunks if is_sparse(case.indexer, chunk.end) and case.layout.buckets(case, chunk)]
    if not staged:
        raise BadValue(f"no chunk of a prompt of {prompt_tokens:,} tokens is staged under layout {case.layout.name!r}")
    q_tokens, pages = sum(chunk.q_tokens for chunk in staged), sum(rules.pages(chunk.end) for chunk in staged)
    selected = padded_selection(case.indexer, rules.sparse.selection_alignment)
    copied = (pages + rules.pages(case.model.native_ctx_tokens)) * rules.page_tokens
    also = {"without_probe_ratio": q_tokens * selected / (pages * rules.page_tokens)}
    return count((q_tokens + case.chunk_tokens) * selected / copied, also=also)


# Memory: amounts whose interval is that of the workspace, or of a rate.


@_figure("GiB")
def vram_total(asked: Asked) -> Estimate:
    """Usable VRAM over all devices."""
    vram = asked.profile.gpu.vram
    return within_spread(vram.value / (GIB / asked.profile.gpu_count), vram.spread)


def _weight_bytes(plan: MemoryPlan) -> float:
    return sum(pool.fixed.get("weights", 0.0) for pool in plan.devices())


def _without_weights(plan: MemoryPlan) -> float:
    return sum(pool.capacity_bytes for pool in plan.devices()) - _weight_bytes(plan)


AMOUNTS: dict[str, Callable[[Asked, MemoryPlan], tuple[float, float]]] = {
    # weights, state and workspace before any cache
    "vram_loaded": lambda _asked, plan: (sum(sum(pool.fixed.values()) for pool in plan.devices()), _weight_bytes(plan)),
    # what loading leaves for a cache
    "vram_free": lambda _asked, plan: (sum(pool.free_bytes() for pool in plan.devices()), _without_weights(plan)),
    # what is left beside the cache of the asked context, too
    "vram_left": lambda asked, plan: (
        plan.vram_left_bytes(), _without_weights(plan) - _vram_bytes_per_token(asked) * asked.question.ctx_tokens
    ),
}  # fmt: skip
"""Bytes of VRAM over all devices, and the naive estimate of them."""


def _of_amount(name: str, asked: Asked) -> Estimate:
    """The devices' workspace is one number, so their errors add up."""
    plan = asked.memory
    size, naive = AMOUNTS[name](asked, plan)
    margin = Z90 * sum(pool.capacity_spread for pool in plan.devices())
    return Estimate(value=size, low=size - margin, high=size + margin, naive=naive).converted(lambda size: size / GIB)


FIGURES |= {name: Figure(unit="GiB", estimate=partial(_of_amount, name)) for name in AMOUNTS}


@_figure("tokens")
def tokens_of_vram_left(asked: Asked) -> Estimate:
    """Tokens whose VRAM share would fill what the asked context leaves."""
    per_token = _vram_bytes_per_token(asked) / GIB
    return _of_amount("vram_left", asked).converted(lambda left: left / per_token)


@_figure("tokens")
def max_context(asked: Asked) -> Estimate:
    """Longest context; naively, what weights leave over bytes a token, tier by tier, and nothing rounded."""
    plan, naive = asked.memory, math.inf
    for pools in (plan.devices(), plan.host()):
        per_token = sum(pool.page_bytes.get("kv cache", 0.0) for pool in pools) / plan.page_tokens
        room = sum(pool.capacity_bytes - pool.fixed.get("weights", 0.0) for pool in pools)
        naive = min(naive, room / per_token if per_token else math.inf)
    value, low, high = (plan.max_ctx_tokens(sigmas=sigmas) for sigmas in (0.0, -Z90, Z90))
    return Estimate(value=value, low=low, high=high, naive=naive)


@_figure("tokens")
def context_that_fits(asked: Asked) -> Estimate:
    """The asked context if it fits, or else the longest that does: for a claim that so much fits."""
    longest, claim = max_context(asked), asked.question.ctx_tokens
    in_ram = plan_memory(replace(asked.case, ngram="ram"), asked.profile)
    (host,) = in_ram.host()
    also = {
        "max_ctx_tokens": longest.value,
        "ngram_in_ram_max_ctx_tokens": in_ram.max_ctx_tokens(),
        "ngram_in_ram_host_used_bytes": host.used_bytes(in_ram.pages),
        "host_capacity_bytes": host.capacity_bytes,
    }
    return longest.converted(lambda tokens: min(claim, tokens), also=also)


@_figure("tokens")
def kv_pool(asked: Asked) -> Estimate:
    """Tokens that the engine prints as the size of its cache; naively, bytes left over bytes a token."""
    pool, device = _pool(asked), asked.memory.devices()[0]
    value, per_token = pool.printed_tokens, asked.case.plane_bytes * asked.case.model.attention_layers
    if asked.question.pool_bytes is not None:
        return Estimate(value=value, low=value, high=value, naive=pool.pool_bytes / per_token)
    weights = device.fixed.get("weights", 0.0) + device.fixed.get("embedding", 0.0)
    left = pool.pool_bytes or min(0.0, device.free_bytes())
    low, high = (
        pool.plan.printed_tokens(
            max(0, pool.plan.blocks_in(int(left + sigmas * device.capacity_spread))), pool.max_model_tokens
        )
        for sigmas in (-Z90, Z90)
    )
    return Estimate(value=value, low=low, high=high, naive=(device.capacity_bytes - weights) / per_token)


@_figure("x")
def concurrency(asked: Asked) -> Estimate:
    """Requests of the longest length that the pool is printed to hold."""
    longest = _pool(asked).max_model_tokens
    return replace(kv_pool(asked), naive=None).converted(lambda tokens: tokens / longest)


# Times, speeds and transfers of one question.

RATES: dict[str, Callable[[Gpu], Link | Roof]] = {
    "link_rate": lambda gpu: gpu.h2d,
    "vram_rate": lambda gpu: gpu.vram_read,
}
"""Rates of the profile, as they are."""


def _of_rate(name: str, asked: Asked) -> Estimate:
    roof = RATES[name](asked.machine.gpu)
    return within_spread(roof.rate.value / GB, roof.rate.spread, naive=roof.datasheet.value / GB)


FIGURES |= {name: Figure(unit="GB/s", estimate=partial(_of_rate, name)) for name in RATES}

Told = Callable[[Question, Answer], tuple[Quantity, float]]
"""(a predicted quantity, the naive estimate of it)."""
QUANTITIES: dict[str, tuple[str, float, Told]] = {
    "decode": ("tok/s", 1, lambda asked, found: (found.decode.tokens_per_s, asked.batch / found.decode.naive_s)),
    "decode_step": ("ms", MS, lambda _asked, found: (found.decode.seconds, found.decode.naive_s)),
    "prefill": (
        "tok/s", 1,
        lambda asked, found: (found.prefill.tokens_per_s, asked.batch * asked.ctx_tokens / found.prefill.naive_s),
    ),
    # from nothing, or from what the prefix cache holds, to the first token
    "ttft": ("s", 1, lambda _asked, found: (found.ttft_s, found.prefill.naive_s)),
    # from nothing to the first token after the asked context
    "time_to_context": (
        "min", MINUTE, lambda _asked, found: (found.ttft_s, found.prefill.naive_s + found.decode.naive_s),
    ),
}  # fmt: skip
"""(unit, its size, what is told) of what a prediction tells by itself."""


def _of_quantity(unit: float, told: Told, asked: Asked) -> Estimate:
    (value, low, high), naive = told(asked.question, asked.answer)
    return Estimate(value=value, low=low, high=high, naive=naive).converted(lambda number: number / unit)


FIGURES |= {
    name: Figure(unit=unit, estimate=partial(_of_quantity, size, told))
    for name, (unit, size, told) in QUANTITIES.items()
}


@_figure("ms")
def time_per_token(asked: Asked) -> Estimate:
    """Decode a token; under speculation a step over what it yields."""
    rate = asked.answer.decode.tokens_per_s
    return Estimate(value=1 / rate.value / MS, low=1 / rate.high / MS, high=1 / rate.low / MS)


@_figure("%", paired=True)
def decode_drop(asked: Asked) -> Estimate:
    """Decode speed lost from the question set against to the one asked."""
    if asked.against is None:
        raise NoAnswer("a drop needs a question to set it against")
    slower, faster = asked.answer, answer(asked.against, asked.profile)
    also: dict[str, float] = {}
    threshold = _threshold(asked)
    if asked.against.ctx_tokens < threshold <= asked.question.ctx_tokens:  # the question against still reads everything
        selecting = answer(replace(asked.against, ctx_tokens=threshold), asked.profile)
        also["drop_from_a_step_that_selects_percent"] = 100 * drop(slower, selecting).value
    return drop(slower, faster).converted(lambda share: 100 * share, also=also)


def _scan_s(asked: Asked, _phase: Phase) -> float:
    gpu = asked.profile.gpu
    peak = gpu.h2d.datasheet if asked.case.pooled == "host" else gpu.vram_read.datasheet
    return _scanned_bytes(asked) / peak.value


def _link_s(asked: Asked, phase: Phase) -> float:
    return phase.link_bytes / asked.profile.gpu.h2d.datasheet.value


PARTS: dict[str, tuple[str, float, Callable[[Answer], Phase], str, Callable[[Asked, Phase], float]]] = {
    # what the bytes of the selected blocks take over the link, latency apart
    "decode_gather": ("ms", MS, lambda found: found.decode, "kv_gather", _link_s),
    "prefill_gather": ("min", MINUTE, lambda found: found.prefill, "kv_gather", _link_s),
    # all pooled keys, from where the question keeps them
    "pooled_scan": ("ms", MS, lambda found: found.decode, "pooled_scan", _scan_s),
}
"""(unit, its size, phase, part of it, naive seconds)."""


def _of_part(name: str, asked: Asked) -> Estimate:
    _, unit, phase_of, part, naive_s = PARTS[name]
    found = asked.answer
    phase = phase_of(found)
    return of_part(phase, part, found.prediction.sources, unit=unit, naive=naive_s(asked, phase) / unit)


FIGURES |= {name: Figure(unit=row[0], estimate=partial(_of_part, name)) for name, row in PARTS.items()}


@_figure("ms")
def attention_per_layer(asked: Asked) -> Estimate:
    """One attention layer in a pass of the drafted tokens and one more: a kernel timed alone."""
    case, question, roofs = asked.case, asked.question, Roofs(asked.profile)
    breakdown = decode_breakdown_of(case, roofs, question.ctx_tokens, question.batch)
    part = next((part for part in breakdown.parts() if part.name == "attention"), None)
    if part is None:
        raise NoAnswer("the prediction has no part 'attention'")
    spread = math.sqrt(sum(roofs.rates[rate].spread ** 2 for rate in part.rates))
    naive = question.ctx_tokens * case.plane_bytes / asked.profile.gpu.vram_read.datasheet.value
    return within_spread(part.seconds / case.model.attention_layers / MS, spread, naive=naive / MS)


# Many requests at once: the workload is served, step by step.

SERVED: dict[str, tuple[str, Callable[[ServingResult], float]]] = {
    # seconds from the first arrival to the last token
    "total_time": ("s", lambda result: result.total_s),
    "throughput": ("tok/s", lambda result: result.output_tokens / result.total_s),
    # the median between tokens of one request
    "inter_token": ("ms", lambda result: result.itl_s.quantile(0.5) / MS),
    # most requests in the pool at once
    "residents": ("requests", lambda result: result.resident_max),
}


def _of_service(name: str, asked: Asked) -> Estimate:
    if name == "inter_token" and asked.workload is not None and asked.workload.output_tokens == 1:
        raise NoAnswer("a request of one token has no time between tokens")
    _, told = SERVED[name]
    timed = name != "residents"
    service = _served(asked, intervals=asked.intervals and timed)
    value = told(service.result)
    low, high = service.ends(told) if timed else (value, value)
    return Estimate(value=value, low=low, high=high)


def _served(asked: Asked, *, intervals: bool) -> Service:
    """All requests at once, each as long as the workload says."""
    load = asked.workload
    if load is None:
        raise NoAnswer("a figure of many requests needs a workload")
    longest = asked.question.max_model_tokens or asked.case.model.native_ctx_tokens
    question = replace(asked.question, ctx_tokens=longest, max_model_tokens=longest)
    workload = Workload(
        count=load.requests, prompt=Lengths(mean=load.prompt_tokens), output=Lengths(mean=load.output_tokens)
    )
    service = serve(question, workload.requests, profile=asked.profile, intervals=intervals)
    if service.result.rejections:
        raise NoAnswer(service.result.rejections[0].reason)
    return service


FIGURES |= {
    name: Figure(unit=unit, estimate=partial(_of_service, name), served=True) for name, (unit, _) in SERVED.items()
}
