"""Times that others published of single kernels on many machines, each as an op with the seconds that it took."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.json import decode

from calibrate.published.speeds import PUBLIC
from hwprofiles import HardwareProfile, load_profile
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.operations.ops import Op, OpGraph, Step

FILES = ("kernels_vllm.json", "kernels_sglang.json")

IMPLEMENTATIONS = {
    "vllm_flash_attn": "flash_attention", "vllm_flash_attn_fa2": "flash_attention",
    "vllm_flash_attn_fa3": "fa3", "vllm_flashinfer_fidecode": "flashinfer",
    "vllm_flashinfer_fiprefill": "flashinfer", "vllm_flashinfer_trtllmdecode": "trtllm_mha",
    "vllm_flashinfer_trtllmprefill": "trtllm_mha", "vllm_default": "library", "torch.nn.functional.linear": "library",
    "sglang": "library", "sglang_torch_linear": "library",
}  # fmt: skip
"""What engines' rulebooks call an implementation; all others of an engine are its own."""
NOT_TAKEN = ("FlashInferFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel", "DeepGemmFp8BlockScaledMMKernel")
"""Timed with the quantisation of their operands, a launch for each of many blocks: another operation than products."""
SHARED = ("flash_attention", "flashinfer", "triton", "fa3", "trtllm_mha")
FORMATS = {"fp8_block": "fp8", "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4", "int4_wo": "w4a16"}
BITS = {"bf16": 16.0, "fp8": 8.0, "nvfp4": 4.5, "mxfp4": 4.25, "w4a16": 4.25}
OPERANDS = {"fp8": "fp8", "nvfp4": "fp4"}  # of products with such weights; all others multiply in bf16
DECODED = 256  # tokens of a step from which on it is taken for a chunk of a prompt
CACHED_BITS = {"bf16": 16, "fp8": 8}


class Curve(Struct, frozen=True, kw_only=True):
    """One kernel in one shape on one machine, over tokens or context."""

    id: str
    machine: str
    engine: str
    operation: str
    implementation: str
    format: str
    shape: dict[str, int | str]
    over: str
    points: tuple[float, ...]
    seconds: tuple[float, ...]
    cold_from: float | None = 0.0


class KernelRow(NamedTuple):
    """One point of a curve."""

    id: str
    curve: str
    file: str
    engine: str
    machine: HardwareProfile
    op: Op
    seconds: float

    @property
    def grain(self) -> float:
        """New tokens of the call."""
        return self.op.grain

    @property
    def named(self) -> str:
        """What a rate that it sets says of it."""
        return f"{self.file} {self.machine.device_name}"

    @property
    def phase(self) -> str:
        """Of which phase it tells."""
        return "decode" if self.op.grain <= DECODED else "prefill"

    def breakdown(self, roofs: Roofs) -> Breakdown:
        """The call as the twin has it. Raises MissingRate."""
        return Breakdown().run((OpGraph(ops=(self.op,)),), roofs)


class _File(Struct, frozen=True, kw_only=True):
    curves: tuple[Curve, ...]


@cache
def kernel_rows() -> tuple[KernelRow, ...]:
    """All points whose operands came from memory, of the files that are shipped."""
    return tuple(
        row
        for name in FILES
        for curve in decode((PUBLIC / name).read_bytes(), type=_File).curves
        for row in _rows(curve, name)
    )


def _rows(curve: Curve, file: str) -> Iterator[KernelRow]:
    if curve.cold_from is None or curve.implementation in NOT_TAKEN:
        return
    machine = load_profile(curve.machine)  # one object a machine, however many curves
    implementation = IMPLEMENTATIONS.get(curve.implementation, curve.implementation)
    if implementation not in (*SHARED, "library"):
        implementation = curve.engine
    fmt = FORMATS.get(curve.format, curve.format)
    key = f"{curve.operation}/{implementation}/{fmt}"
    for point, seconds in zip(curve.points, curve.seconds, strict=True):
        if point >= curve.cold_from:
            yield KernelRow(
                f"{curve.id}-{point:g}", curve.id, file, curve.engine, machine, _op(curve, key, fmt, point), seconds
            )


def _op(curve: Curve, key: str, fmt: str, point: float) -> Op:
    shape = curve.shape
    if curve.operation == "linear":
        return _products(key, fmt, point, elements=_number(shape, "n") * _number(shape, "k"), share=1.0)
    if curve.operation == "experts":
        experts, chosen = _number(shape, "experts"), _number(shape, "chosen")
        each = 3 * _number(shape, "hidden") * _number(shape, "intermediate")
        distinct = experts * (1 - (1 - chosen / experts) ** point)
        return _products(key, fmt, point, elements=each * distinct, share=chosen / distinct)
    return _attention(curve, key, fmt, point)


def _products(key: str, fmt: str, tokens: float, *, elements: float, share: float) -> Op:
    """Products with so many stored elements, a `share` of which meets each token."""
    return Op(
        "weights", 0, kernel=key, vram_bytes=elements * BITS[fmt] / 8, flops=2 * elements * share * tokens,
        dtype=OPERANDS.get(fmt, "bf16"), grain=tokens,
    )  # fmt: skip


def _attention(curve: Curve, key: str, fmt: str, point: float) -> Op:
    shape = curve.shape
    heads, kv_heads, head_dim = (_number(shape, name) for name in ("heads", "kv_heads", "head_dim"))
    token_bytes = 2 * kv_heads * head_dim * CACHED_BITS[fmt] / 8
    if curve.operation == "attend_decode":
        batch = _number(shape, "batch")
        elements = point * batch * 2 * kv_heads * head_dim
        return Op(
            "attention", 0, kernel=key, vram_bytes=point * batch * token_bytes,
            flops=2.0 * elements * heads / kv_heads, dtype="bf16", grain=1,
        )  # fmt: skip
    step = Step(kv_tokens=0, q_tokens=int(point))
    return Op(
        "attention", 0, kernel=key, vram_bytes=point * token_bytes, flops=4.0 * heads * head_dim * step.pairs,
        dtype="bf16", grain=point,
    )  # fmt: skip


def _number(shape: Mapping[str, int | str], name: str) -> int:
    value = shape[name]
    if not isinstance(value, int):
        raise ValueError(f"{name} of a curve is {value!r}, no number")
    return value
