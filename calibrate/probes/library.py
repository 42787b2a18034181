"""The library kernels that a dense model runs on, part by part and as whole layers; see `realkernels/timed/library.py`.

Each part is checked against float64 at the size that is timed, on fresh numbers over poisoned results, before it is
timed; and its results are poisoned again, so that what the timing leaves behind must have been written by it.
"""

from typing import Any, NamedTuple

from calibrate.probes.machine import Machine
from calibrate.probes.memory import MIB
from calibrate.probes.probe import CannotRun, Context, Probe, Sample, check
from calibrate.probes.products import DTYPES, TOLERANCE
from realkernels.shape import DenseShape
from realkernels.timed.call import TimedCall
from realkernels.timed.library import (
    DenseLayers,
    Elementwise,
    FlashAttention,
    Linear,
    PlainAppend,
    Sampling,
    flash_missing,
    random_weights,
)

GPU_SHAPE = DenseShape()
CPU_SHAPE = DenseShape(hidden=1024, query_heads=8, kv_heads=2, intermediate=3584)

LAYERS = 4
"""Layers with weights of their own in one graph: 1.7 GB on a GPU, beyond any cache."""

LIGHT_LAYERS = 8
"""Layers of kernels that have no weights to speak of."""

BF16_CAPABILITY = (8, 0)
VOCABULARY = 128_256
MOST_CACHES = 16
CHAIN_TOLERANCE = 3
"""A whole layer rounds more often than a product: its error may be this many times a product's."""

GPU_TOKENS = tuple(2**power for power in range(14))
QUICK_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 8192)
CPU_TOKENS = (1, 4, 16, 64, 256)


class Point(NamedTuple):
    """`rows` new tokens of each of `batch` sequences after `past` cached ones."""

    batch: int
    rows: int
    past: int

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return self.batch * self.rows


def dtype_name(machine: Machine) -> str:
    """What a dense model computes in on this device."""
    return "bf16" if machine.is_cuda else "fp32"


def _half_precision(machine: Machine) -> str:
    capability = tuple(int(part) for part in machine.compute_capability.split("."))
    if machine.is_cuda and capability < BF16_CAPABILITY:
        return f"bf16 kernels need compute capability 8.0, this device has {machine.compute_capability}"
    return ""


def _shape(context: Context) -> DenseShape:
    return GPU_SHAPE if context.cuda else CPU_SHAPE


def _place(context: Context) -> dict[str, Any]:
    return {"dtype": DTYPES[dtype_name(context.machine)], "device": context.backend.device}


def _element_bytes(context: Context) -> int:
    return int(DTYPES[dtype_name(context.machine)].itemsize)


def _room(context: Context) -> float:
    """Bytes that one probe may take; on a CPU, less than waiting for them to be filled is worth."""
    return 0.6 * context.machine.device_free_bytes if context.cuda else min(1e9, 0.2 * context.machine.host_free_bytes)


def _sample(
    context: Context, name: str, timed: TimedCall, *, tolerance: float = 1.0, **at: float | str
) -> Sample:  # fmt: skip
    """Check, poison, time and look again; counts and seconds are of one layer or cache."""
    dtype = dtype_name(context.machine)
    error = timed.verify()
    how = check(f"{name} at {at}", error < tolerance * TOLERANCE[dtype], f"relative error {error:.1e}")
    work = context.backend.capture(timed.run)
    timed.poison()
    seconds = context.seconds(work, per=timed.calls)
    check(f"{name} at {at}", timed.finite(), "all results written")
    return Sample(
        at={"dtype": dtype, **at}, seconds=seconds, moved_bytes=timed.moved_bytes, flops=timed.flops, checked=how
    )


def _tokens(context: Context, tokens: tuple[int, ...], quick: tuple[int, ...]) -> list[int]:
    """Those whose activations fit."""
    wanted = context.pick(quick, tokens) if context.cuda else CPU_TOKENS
    per_token = _shape(context).activations * _element_bytes(context)
    return context.fitting(wanted, free_bytes=_room(context), per_unit=per_token, share=0.4)


def _layers(context: Context) -> int:
    """As many layers as fit, four at most."""
    layer = _shape(context).parameters * _element_bytes(context)
    return max(1, min(LAYERS, int(0.5 * _room(context) / layer)))


def linear(context: Context) -> list[Sample]:
    """The four products of a layer, one after the other, over tokens; every layer has weights of its own."""
    shape, place = _shape(context), _place(context)
    weights = [random_weights(shape, **place) for _ in range(_layers(context))]
    samples = []
    for tokens in context.points(_tokens(context, GPU_TOKENS, QUICK_TOKENS)):
        products = Linear(shape, tokens=tokens, weights=weights, **place)
        samples.append(_sample(context, "library products", products, tokens=tokens))
    return samples


def elementwise(context: Context) -> list[Sample]:
    """Norms with residual adds, rotation and gating of a layer, over tokens."""
    shape = _shape(context)
    samples = []
    for tokens in context.points(_tokens(context, (1, 64, 256, 1024, 4096, 8192), (1, 256, 2048, 8192))):
        between = Elementwise(shape, tokens=tokens, layers=LIGHT_LAYERS, **_place(context))
        samples.append(_sample(context, "library elementwise", between, tokens=tokens))
    return samples


def append(context: Context) -> list[Sample]:
    """K and V of new tokens to their slots of a layer's planes, over tokens."""
    shape = _shape(context)
    samples = []
    for tokens in context.points(_tokens(context, (1, 256, 2048, 8192), (1, 2048, 8192))):
        written = PlainAppend(shape, tokens=tokens, layers=LIGHT_LAYERS, **_place(context))
        samples.append(_sample(context, "library append", written, tokens=tokens))
    return samples


def sample(context: Context) -> list[Sample]:
    """A token from each row of logits, over rows."""
    samples = []
    for rows in context.points((1, 16, 64, 256) if context.cuda else (1, 4)):
        drawn = Sampling(tokens=rows, vocab=VOCABULARY, device=context.backend.device)
        samples.append(_sample(context, "library sampling", drawn, tokens=rows))
    return samples


def _cache_bytes(context: Context, point: Point) -> int:
    """K and V of one layer."""
    return 2 * point.batch * (point.past + point.rows) * _shape(context).kv_width * _element_bytes(context)


def _attention(context: Context, points: list[Point]) -> list[Sample]:
    """Flash attention at those of `points` whose caches fit, over as many caches as leave none in the device's own."""
    shape, place = _shape(context), _place(context)
    missing = flash_missing(shape, **place)
    if missing:
        raise CannotRun(missing)
    fitting = [point for point in points if 2 * _cache_bytes(context, point) <= _room(context)]
    samples = []
    for point in context.points(fitting):
        beyond = (512 if context.cuda else 64) * MIB / _cache_bytes(context, point)
        caches = max(2, min(MOST_CACHES if point.rows == 1 else LAYERS, round(beyond)))
        size = {"batch": point.batch, "q_tokens": point.rows, "past_tokens": point.past}
        attention = FlashAttention(shape, caches=caches, **size, **place)
        at = {"batch": point.batch, "rows": point.rows, "past_tokens": point.past}
        samples.append(_sample(context, "library attention", attention, **at))
        del attention
    return samples


def attend_dense(context: Context) -> list[Sample]:
    """Causal attention of a chunk of rows over itself and a past."""
    if context.cuda:
        sizes = [(rows, past) for past in context.pick((0, 8192), (0, 8192, 32768)) for rows in (512, 2048, 8192)]
    else:
        sizes = [(64, 0), (256, 0), (64, 512), (256, 512)]  # without a mask over the past: see has_lower_right
    return _attention(context, [Point(1, rows, past) for rows, past in sizes])


def attend_decode(context: Context) -> list[Sample]:
    """One new token of each sequence over its cache."""
    if context.cuda:
        every = ((1, 8192), (64, 1024), (1, 131072), (8, 16384), (256, 512), (64, 4096))
        sizes = context.pick((every[0], every[1], every[3], every[5]), every)
    else:
        sizes = ((1, 512), (1, 4096), (4, 1024), (16, 256))
    return _attention(context, [Point(batch, 1, ctx - 1) for batch, ctx in sizes])


def layer_check(context: Context) -> list[Sample]:
    """Whole layers at points on which no part was fitted: what the sum of the parts is held against."""
    shape, place = _shape(context), _place(context)
    missing = flash_missing(shape, **place)
    if missing:
        raise CannotRun(missing)
    if context.cuda:
        decode = context.pick(((1, 12288), (24, 3072)), ((1, 12288), (6, 6144), (24, 3072), (96, 1536)))
        prefill = context.pick(((3072, 4096),), ((768, 0), (3072, 4096), (1536, 20480)))
    else:
        decode, prefill = ((1, 1536), (6, 384)), ((96, 0),)
    points = [Point(batch, 1, ctx - 1) for batch, ctx in decode] + [Point(1, rows, past) for rows, past in prefill]
    layers = _layers(context)
    fitting = [point for point in points if 2 * layers * _cache_bytes(context, point) <= 0.5 * _room(context)]
    samples = []
    for point in context.points(fitting):
        size = {"batch": point.batch, "q_tokens": point.rows, "past_tokens": point.past}
        whole = DenseLayers(shape, layers=layers, **size, **place)
        at: dict[str, int] = {"batch": point.batch, "rows": point.rows, "past_tokens": point.past, **vars(shape)}
        samples.append(_sample(context, "library layer", whole, tolerance=CHAIN_TOLERANCE, **at))
        del whole
    return samples


PROBES = (
    Probe(name="library_linear", run=linear, supported=_half_precision, quick_s=2, full_s=10),
    Probe(name="library_elementwise", run=elementwise, supported=_half_precision, quick_s=2, full_s=7),
    Probe(name="library_append", run=append, supported=_half_precision, quick_s=0.5, full_s=2),
    Probe(name="library_sample", run=sample, supported=_half_precision, quick_s=0.3, full_s=1),
    Probe(name="library_attend_dense", run=attend_dense, supported=_half_precision, quick_s=1.5, full_s=7),
    Probe(name="library_attend_decode", run=attend_decode, supported=_half_precision, quick_s=1.5, full_s=7),
    Probe(name="layer_check", run=layer_check, supported=_half_precision, quick_s=1.5, full_s=7),
)
