"""Every simplification, numbered as in ARCHITECTURE.md; a prediction names those that it leans on."""

from hwprofiles import HardwareProfile
from twin.ask.case import Case

ASSUMPTIONS = {
    "A1": "engines are first-in-first-out servers; one op holds one engine; two ops never share a link",
    "A2": "layers of one kind cost the same on every device of a kind, and each waits for the one before it",
    "A3": "launches of a layer's backbone, norms and residual mixing are inside the efficiency of its matrices",
    "A4": "tokens choose experts independently and evenly",
    "A5": "rates err independently and log-normally; intervals are first-order",
    "A6": "workspace is spread over devices so that each cache layer has equal room; only its total is published",
    "A7": "a selected block is one run of 4 tokens x all kv heads; masked lanes of the padded selection read nothing",
    "A8": "a staged prefill issues every product of the padded selection once per bucket, masked or not",
    "A9": "registered host memory costs every device 8 bytes of page table per 4 KiB, as measured on H200s",
    "A10": "n-gram rows of a prompt are fetched a chunk ahead, those of a decode step beside the layers before",
    "A11": "all batch sequences have the same length",
    "A12": "buffers that live within one attention call reuse the workspace's largest transient; the arena does not",
    "A13": "beyond the model's native context only memory and speed are predicted; answers need rope scaling",
    "A14": "a what-if format is read at the engine's own rate for as many bytes; decoding it is free",
    "A15": "a block drafter's steps are of two kinds, each with one yield, in the share that the acceptance implies",
    "A16": "of a cached prompt one recurrent state is usable: at its last whole block, one earlier under speculation",
    "A17": "all steps of a served workload are off together, by what a mean decode step or chunk is off",
    "A18": "every decode step of a served sequence yields the mean acceptance",
    "A19": "an engine without a pool of blocks keeps what a window no longer sees",
    "A20": "ranks that share layers are alike and start each sum together; messages go around a ring",
    "A22": "a host's processor reads its weights once a pass, its cache once for every row of queries",
}


def beyond_native(case: Case, tokens: int) -> tuple[str, ...]:
    """What must be said beside an answer about so many tokens, where the model takes fewer by itself (A13)."""
    native = case.model.native_ctx_tokens
    if tokens <= native:
        return ()
    refuses = f"; {case.rules.name} refuses so long a request without it" if case.rules.bounds_context else ""
    return (
        f"{tokens:,} tokens are beyond the model's own {native:,}: only memory and speed are predicted, "
        f"answers need rope scaling{refuses}",
    )


def not_loaded(case: Case) -> tuple[str, ...]:
    """What must be said beside an answer about an engine that does not load such a checkpoint."""
    stored, rules = case.model.weights.format, case.rules
    if stored in rules.weight_formats:
        return ()
    return (f"{rules.name} does not load {stored} weights: memory is counted as if it did",)


def of_another_version(case: Case) -> tuple[str, ...]:
    """What must be said beside an answer about a version of the engine that nobody read."""
    rules = case.rules
    if not rules.asked_version:
        return ()
    return (f"{rules.name} {rules.asked_version} is not known: this is answered by the rules of {rules.version}",)


_ALWAYS = ("A1", "A2", "A3", "A5")


def assumptions_of(case: Case, machine: HardwareProfile, *, extrapolated: tuple[str, ...]) -> tuple[str, ...]:
    """Keys of the assumptions that matter to this case, then a line for each rate used outside its calibrated range."""
    applies = {
        "A4": "experts" in case.model.parameters,
        "A6": machine.gpu_count > 1 and case.rules.cells is None,
        "A7": case.model.selects_blocks,
        "A10": case.model.ngram is not None,
        "A11": case.question.batch > 1,
        "A14": case.borrows,
        "A15": case.speculation is not None and case.speculation.tokens >= case.speculation.drafter.block_tokens > 1,
        "A16": case.cached_tokens > 0 and bool(case.model.states),
        "A13": case.question.ctx_tokens > case.model.native_ctx_tokens,
        "A20": case.tp > 1,
        "A22": case.rules.cells is not None
        and bool(case.cpu_layers or case.question.cpu_experts or case.layout.host_planes),
        "A19": not case.rules.shares_pool
        and case.rules.tensor_cache is None
        and (case.rules.cells is None or case.question.whole_windows)
        and any(mixer.reach for mixer in case.model.caches),
    }
    always = (*_ALWAYS, *case.layout.assumptions(case))
    keys = [key for key in ASSUMPTIONS if key in always or applies.get(key)]
    return (*keys, *(f"extrapolated: {what}" for what in extrapolated))
