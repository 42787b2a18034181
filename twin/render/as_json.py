"""The JSON contracts that scripts rely on: keys may be added, never renamed within a schema number."""

from typing import Any

from msgspec.structs import asdict

from hwprofiles import HardwareProfile
from twin.answers.comparison import Comparison
from twin.ask.case import Case
from twin.ask.question import Question
from twin.assumptions import ASSUMPTIONS
from twin.memory.memory import Memory
from twin.memory.plan import MemoryPlan
from twin.prediction import Z90, Phase, Prediction

PREDICTION_SCHEMA = "twin.prediction/1"
COMPARISON_SCHEMA = "twin.comparison/1"


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction as twin.prediction/1; decode and prefill are null where the question does not fit."""
    rate, longest = prediction.kernel_rate, prediction.memory.max_ctx_tokens
    return {
        "schema": PREDICTION_SCHEMA,
        "question": _question_json(prediction),
        "fits": prediction.fits,
        "max_ctx_tokens": longest(),
        "max_ctx_tokens_90": {"low": longest(sigmas=-Z90), "high": longest(sigmas=Z90)},
        "shortage": prediction.memory.shortage(),
        "missing_rates": list(prediction.missing),
        "not_predicted": prediction.not_predicted,
        "notes": list(prediction.notes),
        "engine": prediction.case.rules.name,
        "kernel": prediction.kernel or None,
        "kernel_source": rate.source if rate else None,
        "kernel_note": rate.note if rate else None,
        "memory": _memory_json(prediction),
        "decode": _phase_json(prediction.decode),
        "prefill": _prefill_json(prediction),
        "assumptions": [f"{key}: {ASSUMPTIONS[key]}" if key in ASSUMPTIONS else key for key in prediction.assumptions],
        "sources": [
            {"rate": name, "value": getattr(rate, "value", None) or list(getattr(rate, "efficiency", ()))}
            | {key: getattr(rate, key) for key in ("spread", "source", "date", "fitted_on", "note")}
            | ({"rung": prediction.rung_of(name)} if "#" in name or name in prediction.rungs else {})
            for name, rate in prediction.sources.items()
        ],
    }


def names_json(case: Case, machine: HardwareProfile) -> dict[str, Any]:
    """What a question is about."""
    names = {"model": case.model.name, "hw": machine.name, "engine": case.rules.name, "layout": case.layout.name}
    return {**names, "kv_dtype": case.fmt.name, "backend": case.backend or None}


def _question_json(prediction: Prediction) -> dict[str, Any]:
    """The question with every default filled in."""
    case, question = prediction.case, prediction.case.question

    def of_layout(name: str, value: Any) -> Any:
        return value if name in case.layout.options else None

    return {
        **names_json(case, prediction.machine),
        **({"engine_version": case.rules.version} if case.rules.version else {}),
        "ctx_tokens": question.ctx_tokens,
        "batch": question.batch,
        "chunk_tokens": case.chunk_tokens,
        "staging_bytes": of_layout("staging_bytes", case.staging_bytes),
        "prefill": of_layout("prefill", case.prefill),
        "copies": of_layout("copies", case.copies),
        "pooled": case.pooled,
        "host_pages": of_layout("host_pages", "huge" if case.huge_pages else "4KiB"),
        "ngram": case.ngram if case.model.ngram is not None else None,
        "weights": case.model.weights.format,
        "lanes": question.lanes,
        **_asked(question, "gpus", "tp", "pp", "split", "pcie_generation", "ram_bytes", "vram_free_bytes"),
        **({"tp": case.tp} if case.tp > 1 else {}),
        "what_if": question.what_if,
        "cached_tokens": case.cached_tokens,
        **_pool_question(prediction),
        **_cell_question(question),
        "speculation": _speculation_json(prediction),
    }


def _asked(question: Question, *names: str) -> dict[str, Any]:
    """Of these fields those that are asked about, and nothing else."""
    return {name: value for name in names if (value := getattr(question, name))}


def _pool_question(prediction: Prediction) -> dict[str, Any]:
    question, pool = prediction.case.question, prediction.memory.kv_pool
    if pool is None:
        return {}
    return {
        "utilisation": pool.limits.utilisation,
        "pool_bytes": question.pool_bytes,
        "max_model_tokens": question.max_model_tokens or question.ctx_tokens,
        "max_sequences": pool.limits.max_sequences,
        **{name: getattr(question, name) for name in ("prefix_caching", "cold_start", "patched", "async_scheduling")},
        **_asked(question, "eager", "graph_tokens", "cached_in", "offload_bytes"),
        "state_element_bytes": prediction.case.state_element_bytes,
    }


def _cell_question(question: Question) -> dict[str, Any]:
    """What is asked of an engine that lays its context out at the start; nothing else."""
    layers = {} if question.gpu_layers is None else {"gpu_layers": question.gpu_layers}
    others = {"cpu_experts": question.cpu_experts, "whole_windows": question.whole_windows}
    return layers | {name: value for name, value in others.items() if value}


def _speculation_json(prediction: Prediction) -> dict[str, Any] | None:
    speculation = prediction.case.speculation
    if speculation is None:
        return None
    return {
        "drafter": speculation.drafter.name,
        "tokens": speculation.tokens,
        "accepted": speculation.accepted,
        "accepted_from": speculation.source,
        "verify_backend": prediction.case.verify_backend,
        "steps": [asdict(kind) for kind in speculation.steps],
        "break_even_accepted": prediction.break_even,
    }


def comparison_json(compared: Comparison) -> dict[str, Any]:
    """Several layouts or formats of one question, with what is published of their answers."""
    return {
        "schema": COMPARISON_SCHEMA,
        "over": compared.over,
        "predictions": [
            prediction_json(each) | {"published_quality": [asdict(row) for row in compared.quality(each)]}
            for each in compared.predictions
        ],
        "refused": [{"name": name, "reason": reason} for name, reason in compared.refused.items()],
    }


def _memory_json(prediction: Prediction) -> dict[str, Any]:
    plan = prediction.memory
    placed = plan.token_bytes
    return {
        "cache_vram_bytes": round(_cache_bytes(plan, plan.devices())),
        "cache_host_bytes": round(_cache_bytes(plan, plan.host())),
        "vram_bytes_per_token": placed.vram_bytes,
        "host_bytes_per_token": placed.host_bytes,
        "page_tokens": plan.page_tokens,
        "vram_left_bytes": round(plan.vram_left_bytes()),
        "limited_by": plan.limit().name,
        "unified": plan.unified,
        **_kv_pool_json(plan),
        "devices": [_pool_json(pool, plan.pages) for pool in plan.memories],
    }


def _kv_pool_json(plan: MemoryPlan) -> dict[str, Any]:
    pool = plan.kv_pool
    if pool is None:
        return {}
    printed = {"kv_pool_tokens": pool.printed_tokens, "kv_pool_bytes": pool.pool_bytes, "kv_pool_blocks": pool.blocks}
    blocks = {"block_tokens": pool.plan.block_tokens, "block_bytes": pool.plan.block_bytes}
    requests = {"max_concurrency": pool.concurrency, "state_blocks_per_request": pool.plan.state_blocks}
    beside = {"window_pool_tokens": pool.window_tokens, "state_pool_slots": pool.states}
    return printed | blocks | requests | {name: size for name, size in beside.items() if size}


def _cache_bytes(plan: MemoryPlan, pools: list[Memory]) -> float:
    return sum(pool.parts(plan.pages).get("kv cache", 0.0) for pool in pools)


def _pool_json(pool: Memory, pages: int) -> dict[str, Any]:
    size = {"capacity_bytes": round(pool.capacity_bytes), "used_bytes": round(pool.used_bytes(pages))}
    return {"name": pool.name, **size, "parts": {name: round(part) for name, part in pool.parts(pages).items()}}


def _phase_json(phase: Phase | None) -> dict[str, Any] | None:
    if phase is None:
        return None
    return {
        "step_s": phase.seconds._asdict(),
        "tokens_per_s": phase.tokens_per_s._asdict(),
        "bound": phase.bound,
        "parts_s": {part.name: part.seconds for part in phase.parts},
        "speed_of_light_s": {part.name: part.sol_s for part in phase.parts},
        **{name: getattr(phase, name) for name in ("link_bytes", "link_write_bytes", "floor_s", "naive_s", "busy_s")},
    }


def _prefill_json(prediction: Prediction) -> dict[str, Any] | None:
    phase = _phase_json(prediction.prefill)
    if phase is None or prediction.ttft_s is None:
        return None
    return {"ttft_s": prediction.ttft_s._asdict(), "prefill_s": phase.pop("step_s"), **phase}
