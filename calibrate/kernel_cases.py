"""What can be both run and predicted: one kernel case, its question to the twin and the program that answers it."""

from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from hwprofiles.profile import HardwareProfile
from twin.case import Case
from twin.format_ops import decode_op, format_case, heads_of, prefill_ops
from twin.layouts.layout import Pass
from twin.ops import Block, Engine, Op, Program
from twin.question import Question
from twin.resolve import resolve

MODEL = "qwen3.8-flash-next"
"""The shape of all kernel cases: 24 query heads, 2 KV heads x 256, 4 index heads x 128, budget 2,048 in blocks of 4."""

Metric = Literal[
    "decode_step",
    "decode_select",
    "decode_gather",
    "prefill_attention",
    "prefill_select",
    "decode_format",
    "prefill_format",
]
KV_DTYPE = "fp16"
"""Of planes of sparse attention that are measured here, as `realkernels.caches.qsa.DTYPE` has it."""

DECODE: tuple[Metric, ...] = ("decode_step", "decode_select", "decode_gather")
FORMATS: tuple[Metric, ...] = ("decode_format", "prefill_format")
_OF_RECORDS = ("host", True, False, 1, "")
"""Tier, huge pages, inline, batch and heads of a gather over records."""


class KernelCase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to time. Decode cases run all `layers` in order; prefill cases run one layer's chunk of `rows`.

    A `decode_format` case is attention of one layer over whole caches in `format`; `rows` are its query tokens. A
    `prefill_format` case is that of a chunk of one sequence, unpacked piece by piece.
    `decode_gather` case with a format reads records on the host.
    """

    metric: Metric
    tier: Literal["vram", "host"]
    ctx_tokens: int
    """Context after the pass."""
    layers: int = 12
    rows: int = 1
    mode: Literal["in_place", "staged"] = "in_place"
    bucket_tokens: int = 0
    copies: Literal["serial", "overlapped"] = "overlapped"
    huge_pages: bool = True
    backbone_bytes: int = 0
    """decode_step only: bytes of a bf16 matrix that a stand-in backbone multiplies with a vector before each layer."""

    format: str = ""
    """Of a decode_format or prefill_format case."""
    inline: bool = False
    """Whether K and V lie as published, where the default arrangement is another."""
    batch: int = 1
    heads: str = ""
    """Of the same: query heads x KV heads x elements of a head; empty: the model's."""

    def __post_init__(self) -> None:
        if (self.metric in FORMATS) != bool(self.format) and not self.of_records:
            raise ValueError(
                "a format belongs to a decode_format or prefill_format case, and only to one, or to a decode_gather"
            )
        if self.metric == "prefill_format" and self.batch != 1:
            raise ValueError("a prefill_format case is a chunk of one sequence")
        if self.of_records and (self.tier, self.huge_pages, self.inline, self.batch, self.heads) != _OF_RECORDS:
            raise ValueError("a decode_gather case with a format reads records on the host, of the model's heads")
        if not 0 < self.rows <= self.ctx_tokens:
            raise ValueError(f"{self.rows} rows do not end a context of {self.ctx_tokens} tokens")
        if self.metric in DECODE and (self.rows != 1 or self.mode == "staged"):
            raise ValueError("a decode case has one row and reads in place")
        if self.mode == "staged" and (self.tier != "host" or self.bucket_tokens < 1):
            raise ValueError("a staged case reads the host through buckets")

    @property
    def of_records(self) -> bool:
        """Whether a format's records are gathered."""
        return self.metric == "decode_gather" and bool(self.format)

    @property
    def id(self) -> str:
        """Readable and unique."""
        if self.format and not self.of_records:
            arrangement = ".inline" if self.inline else ""
            heads = f".h{self.heads}" if self.heads else ""
            if self.metric == "prefill_format":
                return f"{self.metric}.{self.format}{arrangement}.{self.ctx_tokens}.r{self.rows}{heads}"
            return f"{self.metric}.{self.format}{arrangement}.{self.ctx_tokens}.b{self.batch}.q{self.rows}{heads}"
        where = self.tier if self.tier == "vram" or self.huge_pages else "host4k"
        coded = f".{self.format}" if self.format else ""
        name = f"{self.metric}.{where}{coded}.{self.ctx_tokens}"
        if self.metric in DECODE:
            return f"{name}.x{self.layers}" + (f".w{self.backbone_bytes >> 20}MiB" if self.backbone_bytes else "")
        staged = f".{self.copies}.{self.bucket_tokens}" if self.mode == "staged" else ""
        return f"{name}.r{self.rows}{staged}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `KernelCase(**values)` is the way back."""
        return asdict(self)


def question_of(case: KernelCase, *, kv_dtype: str) -> Question:
    """The question that a case without a format of its own answers by measurement."""
    offload: dict[str, Any] = {}
    if case.tier == "host":
        offload = {
            "prefill": "staged" if case.mode == "staged" else "naive",
            "copies": case.copies,
            "host_pages": "huge" if case.huge_pages else "4KiB",
        }
    resolved = resolve(Question(ctx_tokens=case.ctx_tokens, model=MODEL, engine="twin", kv_dtype=kv_dtype))
    if case.mode == "staged":
        offload["staging_bytes"] = case.bucket_tokens * resolved.plane_bytes
    layout = "vram" if case.tier == "vram" else "offload"
    return Question(ctx_tokens=case.ctx_tokens, model=MODEL, engine="twin", layout=layout, kv_dtype=kv_dtype, **offload)


def program_of(case: KernelCase, *, kv_dtype: str) -> Program:
    """The ops that the case times, from the same layouts that whole predictions are made of.

    `kv_dtype` is that of a case without a format of its own.
    """
    if case.format and not case.of_records:
        of_format = format_case(case.format, inline=case.inline, heads=heads_of(case.heads))
        if case.metric == "prefill_format":
            return (Block(ops=prefill_ops(of_format, ctx_tokens=case.ctx_tokens, rows=case.rows)),)
        op = decode_op(of_format, ctx_tokens=case.ctx_tokens, batch=case.batch, query_tokens=case.rows)
        return (Block(ops=(op,)),)
    resolved = resolve(question_of(case, kv_dtype=case.format or kv_dtype))
    if case.metric in DECODE:
        return (_decode_block(case, resolved),)
    chunk = Pass(past=case.ctx_tokens - case.rows, rows=case.rows)
    blocks = resolved.layout.prefill_blocks(resolved, chunk, 0, times=1)
    wanted = _SELECTION if case.metric == "prefill_select" else _ATTENTION
    kept = tuple(part for block in blocks if (part := _only(block, wanted)) is not None)
    if not kept:
        raise ValueError(f"{case.id} has nothing to time")
    return kept


_SELECTION = {"score", "select"}
_ATTENTION = {"attention", "merge", "kv_copy", "kv_gather"}
_WANTED = {
    "decode_step": {"weights", "pooled_scan", "select", "kv_gather"},
    "decode_select": {"pooled_scan", "select"},
    "decode_gather": {"kv_gather"},
}


def _decode_block(case: KernelCase, resolved: Case) -> Block:
    step = Pass(past=case.ctx_tokens - 1, rows=1)
    matrix = Op(
        part="weights",
        engine=Engine.SM,
        device=0,
        kernel=resolved.rules.kernel("linear", "bf16") if case.backbone_bytes else "",
        vram_bytes=case.backbone_bytes,
        flops=case.backbone_bytes,  # 2 operations per element of 2 bytes
        dtype="bf16",
    )
    ops = (matrix, *resolved.layout.decode_ops(resolved, step, 0, first=1))
    kept = _only(Block(ops=ops, times=case.layers), _WANTED[case.metric])
    if kept is None:
        raise ValueError(f"{case.id} has nothing to time")
    return kept


def _only(block: Block, parts: set[str]) -> Block | None:
    """The block's ops of these parts, each after the nearest kept one that it waited for; None if there are none."""
    place: dict[int, int] = {}
    kept: list[Op] = []
    for index, op in enumerate(block.ops):
        if op.part in parts:
            place[index] = len(kept)
            kept.append(op)
    if not kept:
        return None
    return Block(
        ops=tuple(_after_kept(op, block, place) for op in kept),
        iterations=block.iterations,
        times=block.times,
        carried=tuple(
            edge._replace(op=place[edge.op], earlier=place[edge.earlier])
            for edge in block.carried
            if edge.op in place and edge.earlier in place
        ),
    )


def _after_kept(op: Op, block: Block, place: dict[int, int]) -> Op:
    needs: set[int] = set()
    waiting = list(op.after)
    while waiting:
        need = waiting.pop()
        if need in place:
            needs.add(place[need])
        elif need >= 0:
            waiting.extend(block.ops[need].after)
    return replace(op, after=tuple(sorted(needs)))


def missing_rate(case: KernelCase, profile: HardwareProfile) -> str:
    """Empty, or which rates a profile lacks that the case is predicted from: it may be older than their probes."""
    keys = [op.kernel for block in program_of(case, kv_dtype=case.format) for op in block.ops if op.kernel]
    lacking = [key for key in keys if key not in profile.kernels]
    return f"profile {profile.name} has no rate for {', '.join(lacking)}" if lacking else ""
