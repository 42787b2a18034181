"""Samples of library kernels on the machine of `probe_worlds`, from known latencies and efficiencies: no torch."""

from calibrate.probes import ProbeRecord, Sample
from realkernels.shape import DenseShape
from tests.calibrate import probe_worlds as worlds

SHAPE = DenseShape()
LINEAR = {1: 0.9, 64: 0.8, 1024: 0.95, 8192: 0.9}
BETWEEN_LATENCY_S, BETWEEN = 12e-6, {256: 0.4, 8192: 0.8}
APPEND_LATENCY_S, APPEND = 3e-6, {2048: 0.5}
DENSE_LATENCY_S, DENSE = 9e-6, {512: 0.3, 2048: 0.4, 8192: 0.45}
DECODE_LATENCY_S, DECODE = 7e-6, 0.85
SAMPLE_LATENCY_S, SAMPLE = 50e-6, {64: 0.1, 256: 0.2}
BF16_BYTES, LOGITS = 2, 128_000
KEYS = {
    "linear": "linear/library/bf16",
    "elementwise": "elementwise/library/bf16",
    "append": "append/flash_attention/bf16",
    "attend_dense": "attend_dense/flash_attention/bf16",
    "attend_decode": "attend_decode/flash_attention/bf16",
    "sample": "sample/library/fp32",
}
"""Key of each operation's kernel in a profile; sampling is in fp32 whatever the model computes in."""


def probes() -> dict[str, ProbeRecord]:
    """Every library probe and the roof of bf16 products, on top of `probe_worlds.records()`."""
    roof = worlds.sample(1.0, flops=worlds.TENSOR, dtype="bf16", tokens=8192, rows=8192, columns=8192)
    made = {
        "tensor_bf16": [roof],
        "library_linear": [linear(tokens, share) for tokens, share in LINEAR.items()],
        "library_elementwise": [
            streamed(1, SHAPE.elementwise, BETWEEN_LATENCY_S, BETWEEN[256]),
            *(streamed(tokens, SHAPE.elementwise, BETWEEN_LATENCY_S, share) for tokens, share in BETWEEN.items()),
        ],
        "library_append": [streamed(tokens, SHAPE.appended, APPEND_LATENCY_S, APPEND[2048]) for tokens in (1, 2048)],
        "library_sample": [
            drawn(1, SAMPLE[64]),
            *(drawn(rows, share) for rows, share in SAMPLE.items()),
        ],
        "library_attend_dense": [dense(rows, past) for past in (0, 8192) for rows in DENSE],
        "library_attend_decode": [decode(batch, ctx) for batch, ctx in ((1, 8192), (64, 1024), (8, 16384), (64, 4096))],
        "layer_check": [whole(batch=6, rows=1, past=3071), whole(batch=1, rows=1500, past=4096)],
    }
    return {name: ProbeRecord(samples=tuple(samples), took_s=1.0) for name, samples in made.items()}


def linear(tokens: int, share: float) -> Sample:
    """Four products at `share` of the roof."""
    moved, flops = SHAPE.parameters * BF16_BYTES, 2.0 * SHAPE.parameters * tokens
    seconds = max(moved / worlds.VRAM, flops / worlds.TENSOR) / share
    return worlds.sample(seconds, moved=moved, flops=flops, dtype="bf16", tokens=tokens)


def streamed(tokens: int, elements: int, latency_s: float, share: float) -> Sample:
    """Bytes read and written beyond a latency."""
    moved = elements * tokens * BF16_BYTES
    return worlds.sample(latency_s + moved / worlds.VRAM / share, moved=moved, dtype="bf16", tokens=tokens)


def drawn(rows: int, share: float) -> Sample:
    """Rows of fp32 logits, read once; the sample is of a model in bf16."""
    moved = rows * LOGITS * 4
    return worlds.sample(SAMPLE_LATENCY_S + moved / worlds.VRAM / share, moved=moved, dtype="bf16", tokens=rows)


def dense(rows: int, past: int) -> Sample:
    """A chunk's attention, held by its products."""
    flops = SHAPE.attend_flops(batch=1, q_tokens=rows, past_tokens=past)
    seconds = DENSE_LATENCY_S + flops / worlds.TENSOR / DENSE[rows]
    return worlds.sample(seconds, flops=flops, dtype="bf16", batch=1, rows=rows, past_tokens=past)


def decode(batch: int, ctx: int) -> Sample:
    """Decode attention, held by K and V."""
    moved = 2.0 * batch * ctx * SHAPE.kv_width * BF16_BYTES
    flops = SHAPE.attend_flops(batch=batch, q_tokens=1, past_tokens=ctx - 1)
    seconds = DECODE_LATENCY_S + moved / worlds.VRAM / DECODE
    return worlds.sample(seconds, moved=moved, flops=flops, dtype="bf16", batch=batch, rows=1, past_tokens=ctx - 1)


def whole(*, batch: int, rows: int, past: int) -> Sample:
    """A whole layer that takes 1 ms."""
    return worlds.sample(1e-3, dtype="bf16", batch=batch, rows=rows, past_tokens=past, **vars(SHAPE))
