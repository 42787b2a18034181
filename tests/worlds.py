"""Worlds to solve on paper: 1 GB/s memory and links, 1 TFLOP/s, kernels that reach their roof, few layers."""

from collections.abc import Iterable
from typing import Any

from hypothesis import settings
from msgspec.structs import replace

from hwprofiles.ladder import Learned
from hwprofiles.profile import KERNEL_AXES, SCHEMA, Gpu, HardwareProfile, Host, Kernel, Link, Roof
from hwprofiles.rates import Counts, Curve, Rate, Unit
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.engines import EngineRules, load_engine
from twin.engines.rules import SparseRules
from twin.models import ModelSpec
from twin.models.mixers import Attention, GatedDeltaNet, Indexer
from twin.models.spec import SCHEMA as MODEL_SCHEMA
from twin.models.spec import FeedForward, Layer, NgramTable, Weights
from twin.operations.ops import Step

LAWS = settings(max_examples=60, deadline=None, derandomize=True, database=None)
"""Property tests draw the same examples on every run."""

BYTES_PER_S = 1e9
FLOP_PER_S = 1e12
LATENCY_S = 1e-3
PEAK = 2.0
"""Datasheet rate over calibrated rate, everywhere."""

LINEAR = ("linear/exllamav3/bf16", "linear/exllamav3/exl3", "experts/exllamav3/exl3")
KERNELS = tuple(f"{operation}/exllamav3/fp16" for operation in KERNEL_AXES if operation not in ("linear", "experts"))


def rate(value: float, unit: Unit, *, spread: float = 0.0) -> Rate:
    return Rate(value=value, unit=unit, spread=spread, n=1, source="measured", date="2026-01-01")


def curve(at: Iterable[float] = (1.0,), efficiency: Iterable[float] = (1.0,), *, over: str = "tokens") -> Curve:
    points = {"at": tuple(at), "efficiency": tuple(efficiency)}
    return Curve(over=over, **points, spread=0.0, n=1, source="measured", date="2026-01-01")


def operations(*counts: float) -> Counts:
    """Operations an element of programs of 16, 32, ... rows."""
    at = tuple(16.0 * (1 + number) for number in range(len(counts)))
    return Counts(over="program_rows", at=at, counts=counts, spread=0.0, n=1, source="measured", date="2026-01-01")


def link(*, bytes_per_s: float = BYTES_PER_S, latency_s: float = LATENCY_S, run_length: Curve | None = None) -> Link:
    return Link(
        rate=rate(bytes_per_s, "B/s"),
        latency=rate(latency_s, "s"),
        run_length=run_length or curve(over="run_bytes"),
        datasheet=rate(PEAK * bytes_per_s, "B/s"),
    )


def kernel(*, efficiency: Curve | None = None, latency_s: float | None = None) -> Kernel:
    return Kernel(efficiency=efficiency, latency=rate(latency_s, "s") if latency_s is not None else None)


def learned(spread: float) -> Learned:
    """How far borrowed rates are off, by three machines."""
    return Learned(
        spread=spread, n=3, source="measured", date="2026-01-01", machines=3, engines=1, coverage=0.9, half_width=0.5
    )


def at_its_roof(key: str) -> Kernel:
    """A kernel without latency that reaches its roof."""
    return kernel(efficiency=curve(over=KERNEL_AXES[key.split("/", maxsplit=1)[0]]))


def machine(
    *,
    gpu_count: int = 1,
    vram_bytes: float = 2**30,
    host_bytes: float = 2**34,
    h2d: Link | None = None,
    d2h: Link | None = None,
    kernels: dict[str, Kernel] | None = None,
) -> HardwareProfile:
    """A machine whose every kernel reaches its roof; `kernels` lays others over them."""
    roof = Roof(rate=rate(BYTES_PER_S, "B/s"), datasheet=rate(PEAK * BYTES_PER_S, "B/s"))
    gpu = Gpu(
        name="toy",
        compute_capability="8.6",
        sm_count=1,
        vram=rate(vram_bytes, "B"),
        vram_read=roof,
        tensor={"fp16": Roof(rate=rate(FLOP_PER_S, "FLOP/s"), datasheet=rate(PEAK * FLOP_PER_S, "FLOP/s"))},
        h2d=h2d or link(),
        d2h=d2h or link(),
    )
    return HardwareProfile(
        schema=SCHEMA,
        name="toy",
        summary="a machine for sums on paper",
        gpu_count=gpu_count,
        gpu=gpu,
        host=Host(memory=rate(host_bytes, "B"), reserved=rate(2**20, "B"), dram=link(), disk=link()),
        kernels={key: at_its_roof(key) for key in (*LINEAR, *KERNELS)} | (kernels or {}),
    )


def model(*, layers: int = 4, every: int = 2, sparse: bool = True, ngram: bool = False) -> ModelSpec:
    """Hidden 8, 4 query and 2 kv heads of 8; sparse: 16 tokens in blocks of 4, so dense up to 19 tokens.

    Attention closes every group of `every` layers, the others are recurrent.
    """
    indexer = Indexer(query_heads=2, head_dim=4, budget=16, ratio=4) if sparse else None
    attention = Attention(query_heads=4, kv_heads=2, head_dim=8, indexer=indexer)
    recurrent = GatedDeltaNet(key_heads=1, value_heads=2, head_dim=4, conv_kernel=4)
    feed_forward = FeedForward(intermediate=16)
    kinds = {"attention": Layer(mixers=(attention,), feed_forward=feed_forward)}
    if every > 1:
        kinds["recurrent"] = Layer(mixers=(recurrent,), feed_forward=feed_forward)
    return ModelSpec(
        schema=MODEL_SCHEMA,
        name="toy",
        summary="a model for sums on paper",
        source="made up",
        hidden=8,
        vocab=32,
        layers=layers,
        kinds=kinds,
        order=(("recurrent", every - 1), ("attention", 1)) if every > 1 else (("attention", 1),),
        native_ctx_tokens=1024,
        weights=Weights(format="bf16", bits=16),
        ngram=NgramTable(table_bytes=2**20, row_bytes=100, rows_per_token=2, before_layer=1) if ngram else None,
    )


def case(
    ctx_tokens: int = 64, *, spec: ModelSpec | None = None, rules: dict[str, Any] | None = None, **asked: Any
) -> Case:
    """A question about the toy model (or `spec`), under exllamav3's rules with pages of 8 and chunks of 16 tokens.

    The embedding lies on the device.
    """
    toy = {"page_tokens": 8, "chunk_tokens": 16, "staging_bytes": 1024, "workspace": rate(2**20, "B")}
    toy["embedding_on_host"] = False
    spec = spec or model()
    whole = resolve(Question(ctx_tokens=ctx_tokens, **asked))
    small = with_rules(load_engine("exllamav3"), **(toy | (rules or {})))
    return replace(
        whole,
        model=spec,
        mixer=spec.attention,
        rules=small,
        chunk_tokens=asked.get("chunk_tokens", small.chunk_tokens),
        staging_bytes=asked.get("staging_bytes", small.sparse.staging_bytes),
    )


def step(kv_tokens: int, q_tokens: int = 1, batch: int = 1) -> Step:
    return Step(kv_tokens=kv_tokens, q_tokens=q_tokens, batch=batch)


def with_rules(rules: EngineRules, **changes: Any) -> EngineRules:
    """`rules` with some of them changed, those of sparse attention by their plain names too."""
    sparse = {name: value for name, value in changes.items() if name in SparseRules.__struct_fields__}
    own = {name: value for name, value in changes.items() if name not in sparse}
    return replace(rules, sparse_kernels=replace(rules.sparse, **sparse), **own)


def flash_next(ctx_tokens: int = 1, **asked: Any) -> Case:
    """A question about the published model as it is."""
    return resolve(Question(ctx_tokens=ctx_tokens, **asked))
