"""From a Question to a Case: every name looked up, every default filled in, every combination checked."""

from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from hwprofiles.links import FULL_LANES
from hwprofiles.profile import CPU_CAPABILITY
from hwprofiles.spelling import match, plain
from twin.ask.case import Case
from twin.ask.question import Question, check_numbers, flag
from twin.ask.sharing import shared
from twin.engines import OWN, EngineRules, engine_names, load_engine
from twin.engines.rules import version_numbers
from twin.errors import BadValue, Impossible
from twin.formats import KVFormat, is_exl3, kv_format, listed
from twin.layouts import CacheLayout, load_layout
from twin.memory.block_pool import with_prefix_cache, with_step_limits
from twin.memory.token_pool import card_defaults
from twin.models import ModelSpec, load_model
from twin.models.mixers import Attention, LatentAttention
from twin.models.rewritten import in_weights
from twin.models.speculation import Speculation, speculation_of
from twin.operations.counts import FULL_BYTES, HALF_BYTES

_HOST_OPTIONS = {"staging_bytes", "prefill", "copies", "pooled", "host_pages"}
"""What only a layout with planes on the host understands."""

_POOL_OPTIONS = {"utilisation", "pool_bytes", "max_model_tokens", "max_sequences", "prefix_caching", "cached_tokens"}
"""What only an engine whose requests share one pool understands."""

_BLOCK_OPTIONS = {"cold_start", "patched", "promotes_windows", "async_scheduling", "cached_in", "offload_bytes"}
_BLOCK_OPTIONS |= {"eager", "graph_tokens"}
"""What only an engine with a pool of blocks understands."""

_TOKEN_OPTIONS = {"window_share", "state_slots"}
"""What only an engine with pools of tokens, windows and states understands."""

_CELL_OPTIONS = {"gpu_layers", "cpu_experts", "whole_windows"}
"""What only an engine understands that lays its whole context out as it starts."""

_NOTHING_ASKED = Question(ctx_tokens=1)

_STATE_BYTES = {"fp16": HALF_BYTES, "fp32": FULL_BYTES}

ENGINES_OWN = "auto"  # what engines call their default format
GGUF_VECTORS = "f32"  # in what GGUFs alone keep norms


def resolve(question: Question, *, devices: int | None = None) -> Case:
    """Look every name up and check every number. Raises UnknownName, BadValue or Impossible.

    `devices`: of the machine, where it is another than the one that the question names.
    """
    check_numbers(question)
    model = load_model(question.model)
    if question.weights is not None:
        model = in_weights(model, question.weights)
    rules = _engine_of(model) if question.engine is None else load_engine(question.engine)
    if model.weights.format in rules.loads_as:
        model = in_weights(model, rules.loads_as[model.weights.format])
    if question.layout is None:  # the engine's first that the model can be asked for
        layouts = (load_layout(name) for name in rules.layouts)
        layout = next(each for each in layouts if model.selects_blocks or not each.needs_indexer)
    else:
        layout = load_layout(question.layout)
    _check_options(question, layout, rules)
    if layout.name not in rules.layouts:
        raise Impossible(f"{rules.name} has no layout {layout.name!r}", hint=f"it has {', '.join(rules.layouts)}")
    fmt = _format_of(question, rules, model, layout)
    if layout.needs_indexer and not model.selects_blocks:
        raise Impossible(f"{model.name} reads its whole cache at every step: {layout.name} needs sparse attention")
    if layout.heads_only and any(isinstance(mixer, LatentAttention) for mixer in model.caches):
        raise Impossible(
            f"{model.name} caches compressed vectors: {layout.name} is modelled for keys and values of heads"
        )
    sparse = rules.sparse if model.selects_blocks else None
    rated = kv_format(rules.formats[0]) if question.what_if and fmt.kind != "plain" else fmt
    backend, verify_backend = _backends_of(question, rules, rated)
    case = Case(
        question=question,
        model=model,
        rules=rules,
        fmt=fmt,
        layout=layout,
        backend=backend,
        verify_backend=verify_backend,
        chunk_tokens=question.chunk_tokens or rules.chunk_tokens,
        staging_bytes=question.staging_bytes or (sparse.staging_bytes if sparse else 0),
        prefill=question.prefill or "auto",
        copies=question.copies or ("overlapped" if sparse and sparse.overlaps_copies else "serial"),
        pooled=question.pooled or "vram",
        ngram=question.ngram or ("ram" if rules.ngram == "ram" else "disk"),
        huge_pages=(question.host_pages or "huge") == "huge",
        state_element_bytes=_state_bytes(question, model, rules),
        mixer=model.attention,
        speculation=_speculation(question, model, rules, fmt),
    )
    _check_case(case)
    case = shared(case, lambda: devices or load_profile(case.hw).gpu_count)
    return with_prefix_cache(case) if rules.shares_pool else case


def _state_bytes(question: Question, model: ModelSpec, rules: EngineRules) -> int:
    """Bytes of an element of a recurrent state: as asked, as the model's makers want where they are heard, or usual."""
    if question.state_dtype is not None:
        return _STATE_BYTES[question.state_dtype]
    return FULL_BYTES if model.full_states and rules.heeds_full_states else rules.state_element_bytes


def _engine_of(model: ModelSpec) -> EngineRules:
    """The first engine that loads the model's checkpoint, of those that it is meant for before the others.

    This project's own kernels only where asked for by name.
    """
    engines = [load_engine(name) for name in engine_names() if name != OWN]
    stored, gguf = model.weights.format, model.weights.stored("vectors").format == GGUF_VECTORS
    able = [each for each in engines if each.volunteers]
    for rules in sorted(able, key=lambda each: not (each.cells if gguf else stored in each.usual_for)):
        if stored in rules.weight_formats and (not model.selects_blocks or rules.sparse_kernels):
            return rules
    hint = "--engine NAME counts its memory under one of them; --weights bf16 asks about the same shape in 16 bits"
    raise Impossible(f"no engine here loads {model.name} in {model.weights.format}", hint=hint)


def _format_of(question: Question, rules: EngineRules, model: ModelSpec, layout: CacheLayout) -> KVFormat:
    asked = question.kv_dtype
    fmt = kv_format(rules.formats[0] if asked is None or plain(asked) == ENGINES_OWN else asked)
    kept = rules.formats_of(layout.name)
    if len(fmt.parts) > 1 and rules.cells is None:
        raise Impossible(f"{rules.name} keeps K and V alike, not as {fmt.name}")
    if not rules.keeps(fmt, layout.name) and not question.what_if:
        hint = f"it keeps {listed(kept)}; --what-if counts its bytes anyway"
        raise Impossible(f"{rules.name} keeps no {fmt.name} cache under {layout.name}", hint=hint)
    _check_heads(fmt, model, rules)
    return fmt


def _check_heads(fmt: KVFormat, model: ModelSpec, rules: EngineRules) -> None:
    """Refuse a format in which some layer's heads, or compressed vectors, cannot be kept."""
    of_vectors = fmt.kind == "plain" or fmt.name == "fp8" or is_exl3(fmt.name) or rules.cells is not None
    for mixer in model.caches:
        if isinstance(mixer, LatentAttention) and not of_vectors:
            raise Impossible(f"{fmt.name} keeps keys and values of heads, {model.name} caches compressed vectors")
        widths = {mixer.kv_rank} if isinstance(mixer, LatentAttention) else {mixer.head_dim, mixer.value_width}
        for width in widths:
            if refused := fmt.check(head_dim=width):
                raise Impossible(refused)


def _backends_of(question: Question, rules: EngineRules, fmt: KVFormat) -> tuple[str, str]:
    """Backend of prefill and single-token steps, and that of steps of several query tokens."""
    backends = rules.backends_of(fmt.name)
    default = backends[0] if backends else ""
    asked = question.backend
    if asked is None:
        return default, rules.backends.verify.get(fmt.name, default)
    found = match(asked, backends)
    if found is None:
        known = ", ".join(backends) or "no choice of backends"
        raise Impossible(f"{rules.name} runs no {fmt.name} cache on {asked!r}", hint=f"it has {known}")
    return (default if found in rules.backends.verify_only.get(fmt.name, ()) else found), found


def _speculation(question: Question, model: ModelSpec, rules: EngineRules, fmt: KVFormat) -> Speculation | None:
    if question.speculation is None:
        for field in ("accepted", "task"):
            if getattr(question, field) is not None:
                raise Impossible(f"{flag(field)} means nothing without --spec: one step yields one token")
        return None
    if not rules.shares_pool and rules.cells is None:
        able = "engines whose requests share a pool and llama.cpp"
        raise Impossible(f"speculation is modelled for {able}, not for {rules.name}")
    text, accepted, task = question.speculation, question.accepted, question.task
    ctx_tokens = question.ctx_tokens
    return speculation_of(model, text, accepted=accepted, task=task, kv_dtype=fmt.name, ctx_tokens=ctx_tokens)


def _check_options(question: Question, layout: CacheLayout, rules: EngineRules) -> None:
    asked = [
        field for field in Question.__struct_fields__ if getattr(question, field) != getattr(_NOTHING_ASKED, field)
    ]
    for field in asked:
        if field in _HOST_OPTIONS and field not in layout.options:
            where = f"layout {layout.name!r}: its planes never cross the link"
            raise Impossible(f"{flag(field)} means nothing under {where}")
        if field in _CELL_OPTIONS and rules.cells is None:
            raise Impossible(f"{flag(field)} means nothing to {rules.name}: llama.cpp understands it")
        if field == "max_sequences" and rules.cells is not None:
            continue
        if field in _POOL_OPTIONS | _BLOCK_OPTIONS and not rules.shares_pool:
            raise Impossible(f"{flag(field)} means nothing to {rules.name}: it shares no pool of blocks among requests")
        if field in _BLOCK_OPTIONS and rules.block_pool is None:
            raise Impossible(f"{flag(field)} means nothing to {rules.name}: it has no pool of blocks")
        if field in _TOKEN_OPTIONS and rules.token_pool is None:
            raise Impossible(f"{flag(field)} means nothing to {rules.name}: it has no pools of windows and states")


def _check_case(case: Case) -> None:
    """Refuse numbers that are fine by themselves and contradict each other or the engine."""
    question, engine, page = case.question, case.rules.name, case.rules.page_tokens
    if case.chunk_tokens % page and case.rules.cells is None:
        raise BadValue(f"chunk of {case.chunk_tokens:,} tokens is not a multiple of {engine}'s page of {page}")
    least = page * case.plane_bytes
    if question.staging_bytes is not None and case.staging_bytes < least:
        hint = f"one page of {page} tokens with K and V"
        raise BadValue(f"staging of {case.staging_bytes:,} B is below the smallest of {least:,} B", hint=hint)
    if question.ngram is not None and case.model.ngram is None:
        raise Impossible(f"{case.model.name} has no n-gram table")
    if case.prefill == "staged" and question.batch != 1:
        raise Impossible(f"{engine} stages a prefill only for one sequence at a time")
    if (question.cached_in == "host" or question.offload_bytes) and case.model.states:
        raise Impossible(f"a cache on the host is modelled without recurrent states, which {case.model.name} keeps")
    if question.cached_in == "host" and not question.cached_tokens:
        raise Impossible("--cached-in means nothing without cached tokens", hint="add --cached N --prefix-cache")
    if question.gpu_layers is not None and case.layout.host_planes:
        raise Impossible(f"{flag('gpu_layers')} with layout {case.layout.name!r} is not modelled", hint="ask for one")
    longest, most = question.max_model_tokens, question.max_sequences
    if longest is not None and longest < question.ctx_tokens:
        raise BadValue(f"context {question.ctx_tokens:,} is above the longest request of {longest:,} tokens")
    if most is not None and question.batch > most:
        raise Impossible(f"a batch of {question.batch:,} is more than the {most:,} sequences that {engine} may run")


def on_machine(case: Case, machine: HardwareProfile) -> Case:
    """The case with what the engine chooses by the card, where the question does not.

    That is its attention backend, but for steps of several query tokens where it has one of its own for these, and how
    much one step takes.
    """
    rules, question = case.rules, case.question
    if question.backend is None:
        backend = _backend_on(case, machine)
        verify = rules.backends.verify.get(case.rated_format, backend)
        case = replace(case, backend=backend, verify_backend=verify)
    if rules.block_pool is not None:
        return with_step_limits(case, machine)
    if rules.token_pool is not None and question.chunk_tokens is None:
        case = replace(case, chunk_tokens=card_defaults(rules.token_pool, machine).chunk_tokens)
    return case


def _backend_on(case: Case, machine: HardwareProfile) -> str:
    """The default backend on a card: that of its compute capability, or the first, if it runs heads as wide."""
    rules, fmt, widest = case.rules, case.rated_format, case.rules.backends.widest_heads
    by_card = rules.backends.by_capability.get(machine.gpu.compute_capability, {}).get(fmt, case.backend)
    latents = rules.backends.of_latents
    if latents and isinstance(case.mixer, LatentAttention):
        by_card = latents.get(machine.gpu.compute_capability, latents[""])
    if not machine.gpu.runs_cuda and rules.backends.without_cuda in rules.backends_of(fmt):
        by_card = rules.backends.without_cuda
    heads = max((mixer.head_dim for mixer in case.model.caches if isinstance(mixer, Attention)), default=0)
    order = (by_card, *rules.backends_of(fmt))
    return next((name for name in order if heads <= widest.get(name, heads)), by_card)


def settled(question: Question, profile: HardwareProfile | None) -> tuple[Case, HardwareProfile]:
    """The case and the machine that it runs on, each as the other makes it."""
    case = resolve(question, devices=profile.gpu_count if profile else None)
    machine = machine_of(case, profile)
    case = on_machine(case, machine)
    check_capability(case, machine)
    return case, machine


def machine_of(case: Case, profile: HardwareProfile | None) -> HardwareProfile:
    """`profile` or the machine that the question names, as it is asked about; refused where it cannot run it."""
    machine, question = profile or load_profile(case.hw), case.question
    try:
        count = case.devices or question.gpus
        if count is not None and count != machine.gpu_count:
            machine = machine.repeated(count)
        if question.ram_bytes is not None:
            machine = machine.with_ram(question.ram_bytes)
        if question.vram_free_bytes is not None:
            machine = machine.with_free_vram(question.vram_free_bytes)
        if question.lanes != FULL_LANES or question.pcie_generation is not None:
            machine = machine.with_link(question.lanes, question.pcie_generation)
    except ValueError as wrong:
        raise Impossible(f"{machine.name}: {wrong}") from None
    _check_maker(case, machine)
    check_capability(case, machine)
    return machine


def _check_maker(case: Case, machine: HardwareProfile) -> None:
    """Refuse a device without CUDA on which the engine does not run, or keeps no such format."""
    gpu, makers = machine.gpu, case.rules.makers
    if not makers or gpu.runs_cuda or gpu.compute_capability == CPU_CAPABILITY:
        return
    kept, engine = makers.get(gpu.name.partition(" ")[0]), case.rules.name
    if kept is None:
        raise Impossible(f"{engine} does not run on {machine.name}: {gpu.name} has neither CUDA nor ROCm")
    if case.fmt.name not in kept and not case.question.what_if:
        hint = f"there it keeps {listed(kept)}; --what-if counts its bytes anyway"
        raise Impossible(f"{engine} keeps no {case.fmt.name} cache on {machine.name}, which has no CUDA", hint=hint)


def check_capability(case: Case, machine: HardwareProfile) -> None:
    """Refuse an engine that does not start on this device, and a format whose kernels do not."""
    least, gpu = case.rules.least_capability, machine.gpu
    if least and gpu.runs_cuda and version_numbers(gpu.compute_capability) < version_numbers(least):
        raise Impossible(f"{case.rules.name} needs SM {least} or newer, {gpu.name} has SM {gpu.compute_capability}")
    needs = case.rules.needs.get(case.fmt.name, case.fmt.min_capability)
    needs = case.rules.needs.get(f"{case.backend}/{case.fmt.name}", needs)
    has = machine.gpu.compute_capability
    if needs and version_numbers(has) < version_numbers(needs) and not case.question.what_if:
        own = f"has SM {has}" if machine.gpu.runs_cuda else "has no CUDA"
        kernels = f"{case.rules.name}'s kernels need SM {needs} or newer, {machine.gpu.name} {own}"
        hint = "--what-if counts its bytes anyway"
        raise Impossible(f"{case.fmt.name} does not start on {machine.name}: {kernels}", hint=hint)
