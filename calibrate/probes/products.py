"""Matrix products over tokens, matrix-vector products over sizes, and selecting the largest scores."""

from functools import partial
from typing import Any

import torch

from calibrate.probes.machine import Machine
from calibrate.probes.memory import MIB
from calibrate.probes.probe import Context, Probe, Sample, check

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = {"fp16": 5e-3, "bf16": 2e-2, "fp32": 1e-3}
"""Relative error of a product against float64 that is still called right: rounding of the result and of its sums."""

GPU_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CPU_TOKENS = (16, 64, 256, 1024)


def tensor(context: Context, *, dtype: str) -> list[Sample]:
    """Products [tokens, k] x [k, n] with several matrices in turn, so that each is read from memory."""
    samples = []
    width = 4096 if context.cuda else 2048
    count = context.pick(4, 8) if context.cuda else 4
    for tokens in context.points(context.pick(GPU_TOKENS[::2], GPU_TOKENS) if context.cuda else CPU_TOKENS):
        samples.append(_product(context, dtype, tokens=tokens, rows=width, columns=width, count=count))
    if context.cuda:
        for size in context.points(context.pick((8192,), (4096, 8192))):
            samples.append(_product(context, dtype, tokens=size, rows=size, columns=size, count=1))
    return samples


def matrix_vector(context: Context) -> list[Sample]:
    """One token through matrices of tens of MB: the rate at which weights stream."""
    samples = []
    width = 4096
    sizes = context.pick((16, 64), (8, 16, 32, 64, 128)) if context.cuda else context.pick((16,), (16, 64))
    dtypes = ("fp16", "bf16") if context.cuda else ("fp16", "bf16", "fp32")
    for size, dtype in context.points([(size, dtype) for size in sizes for dtype in dtypes]):
        rows = size * MIB // width // (4 if dtype == "fp32" else 2)
        count = max(2, (512 if context.cuda else 128) // size)
        samples.append(_product(context, dtype, tokens=1, rows=rows, columns=width, count=count))
    return samples


def _product(context: Context, dtype: str, *, tokens: int, rows: int, columns: int, count: int) -> Sample:
    """`count` products, each with a matrix [rows, columns] of its own; seconds of one."""
    kind, device = DTYPES[dtype], context.backend.device
    matrices = [torch.randn(rows, columns, device=device).mul_(columns**-0.5).to(kind) for _ in range(count)]
    inputs = torch.randn(tokens, columns, device=device).to(kind)
    outputs = torch.empty(tokens, rows, dtype=kind, device=device)

    def products() -> None:
        for matrix in matrices:
            _multiply(inputs, matrix, outputs)

    seconds = context.seconds(context.backend.capture(products), per=count)
    some = min(tokens, 4)
    truth = inputs[:some].double() @ matrices[-1].double().T
    error = float((outputs[:some].double() - truth).norm() / truth.norm())
    how = check(f"{dtype} product", error < TOLERANCE[dtype], f"relative error {error:.1e}")
    moved = matrices[0].numel() * matrices[0].element_size()
    at: dict[str, int | float | str] = {"dtype": dtype, "tokens": tokens, "rows": rows, "columns": columns}
    return Sample(at=at, seconds=seconds, moved_bytes=moved, flops=2.0 * tokens * rows * columns, checked=how)


def _multiply(inputs: Any, matrix: Any, outputs: Any) -> None:
    if inputs.shape[0] == 1:
        torch.mv(matrix, inputs[0], out=outputs[0])
    else:
        torch.mm(inputs, matrix.T, out=outputs)


def topk(context: Context) -> list[Sample]:
    """Selection by torch of 512 of ctx / 4 scores: what the selection's own kernel is held against."""
    samples = []
    for ctx in context.points(context.pick((32768, 1048576), (4096, 32768, 262144, 1048576, 2097152))):
        scores = torch.zeros(ctx // 4, dtype=torch.float32, device=context.backend.device)
        values, indices = torch.topk(scores, 512)
        seconds = context.seconds(
            partial(torch.topk, scores, 512, out=(values, indices)),
            before=scores.normal_,
        )
        how = check("topk", torch.equal(values, scores.sort(descending=True).values[:512]), "equal to a full sort")
        samples.append(Sample(at={"ctx_tokens": ctx}, seconds=seconds, checked=how))
    return samples


def _singles(machine: Machine) -> str:
    return "" if not machine.is_cuda else "no layout keeps fp32 planes on a GPU"


PROBES = (
    Probe(name="tensor_bf16", run=partial(tensor, dtype="bf16"), quick_s=2, full_s=8),
    Probe(name="tensor_fp16", run=partial(tensor, dtype="fp16"), quick_s=2, full_s=8),
    Probe(name="tensor_fp32", run=partial(tensor, dtype="fp32"), supported=_singles, quick_s=4, full_s=10),
    Probe(name="matrix_vector", run=matrix_vector, quick_s=1, full_s=6),
    Probe(name="topk", run=topk, quick_s=1, full_s=4),
)
