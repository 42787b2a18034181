"""Compiles the decode attention kernels for several compute capabilities, on any machine; prints what they need.

PYTHONPATH=. python tests/gpu/format_suite_compile.py [90 86 ...]
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from realkernels.attend import decode_plain, decode_scaled, merge
from realkernels.attend.plan import alignment
from realkernels.codecs import codec_named

CPU = torch.device("cpu")
SHARED_BYTES = {80: 163, 86: 99, 89: 99, 90: 227}
"""KiB that a program may have."""
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int16: "*i16",
}  # fmt: skip


class Recorder:
    """Stands where a kernel is launched and keeps the arguments of the launch."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **named: object) -> None:
            self.arguments, self.named = arguments, named

        return launch


def build(kernel: Any, recorder: Recorder, capability: int) -> Any:
    """The compiled kernel of a recorded launch, its hardware's instructions used."""
    named = {**recorder.named, "ASM": True} if "ASM" in kernel.arg_names else dict(recorder.named)
    options = {"num_warps": named.pop("num_warps")}
    values = dict(zip(kernel.arg_names, recorder.arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in named:
            signature[name], constants[(index,)] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[name] = TYPES[value.dtype] if is_tensor else {int: "i32", float: "fp32"}[type(value)]
        number = value.data_ptr() if is_tensor else value
        if name != "splits" and isinstance(number, int) and number % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled: Any) -> str:
    """Registers a thread, bytes of stack a thread, bytes of shared memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"{what}:(\d+)", said) for what in ("REG", "STACK"))
    needs = f"{registers and registers[1]:>4} registers {stack and stack[1]:>5} B stack"
    return f"{needs} {compiled.metadata.shared:7d} B shared"


def compile_one(case: tuple[str, str, int, int, int, int, int]) -> str:
    """What one kernel needs of a multiprocessor."""
    name, arrangement, heads, dim, page, q_tokens, capability = case
    large = capability >= 90
    for module in (decode_plain, decode_scaled):
        module.is_large = lambda _device, large=large: large
    decode_scaled.multiplies_registers = lambda _device: capability // 10 == 9
    query = torch.zeros(1, q_tokens, 24, dim, dtype=torch.bfloat16)
    form = codec_named(name, arrangement=arrangement)
    views = form.views(form.allocate(2, page, heads, dim, CPU))
    table, lengths = torch.zeros(1, 16, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    rows = 24 // heads * q_tokens
    recorder = Recorder()
    kept = merge.merge
    try:
        if name in ("bf16", "fp16"):
            kernel, decode_plain._attend_plain = decode_plain._attend_plain, recorder
            decode_plain.merge = lambda *_a: None
            plan = decode_plain.plan_plain(query_rows=rows, head_dim=dim, device=CPU)
            workspace = plan.workspace(query, kv_heads=heads, max_tokens=4096)
            decode_plain.attend_plain(
                query, views["key_data"], views["value_data"], table, lengths, query, workspace, softmax_scale=1.0
            )
            decode_plain._attend_plain = kernel
        else:
            kernels = decode_scaled._attend_scaled, decode_scaled.attend_columns
            decode_scaled._attend_scaled = decode_scaled.attend_columns = recorder
            decode_scaled.merge = lambda *_a: None
            aligned = alignment(views["key_data"], views["value_data"])
            per_token = views["key_scale"].dim() > 1
            plan = decode_scaled.plan_scaled(
                query_rows=rows, head_dim=dim, device=CPU, aligned=aligned, per_token=per_token
            )
            kernel = kernels[plan.across]
            workspace = plan.workspace(query, kv_heads=heads, max_tokens=4096)
            decode_scaled.attend_scaled(
                query, views["key_data"], views["value_data"], views["key_scale"], views["value_scale"], table,
                lengths, query, workspace, kind="fp8" if name.startswith("fp8") else "int8", softmax_scale=1.0,
            )  # fmt: skip
            decode_scaled._attend_scaled, decode_scaled.attend_columns = kernels
    finally:
        decode_plain.merge = decode_scaled.merge = kept
    title = f"sm_{capability} {name:20s} {arrangement:8s} {heads} x {dim} page {page:3d} q {q_tokens:2d}"
    compiled = build(kernel, recorder, capability)
    fits = "" if compiled.metadata.shared <= SHARED_BYTES[capability] * 1024 else "  DOES NOT FIT"
    return f"{title}: {resources(compiled)}{fits}"


def cases(capabilities: list[int]) -> Iterator[tuple[str, str, int, int, int, int, int]]:
    """Kernels, without those that a capability has no instructions for."""
    formats = [
        ("bf16", "aligned"), ("int8_per_token_head", "aligned"), ("int8_per_token_head", "inline"),
        ("fp8_per_token_head", "aligned"), ("fp8", "aligned"),
    ]  # fmt: skip
    for capability in capabilities:
        for name, arrangement in formats:
            if name.startswith("fp8") and capability < 89:
                continue
            for heads, dim, page, q_tokens in (
                (4, 256, 256, 1),
                (4, 256, 256, 4),
                (4, 256, 256, 8),
                (4, 256, 16, 1),
                (4, 256, 16, 4),
                (8, 128, 128, 4),
            ):
                yield name, arrangement, heads, dim, page, q_tokens, capability


def main() -> None:
    """Compile all, print a line each."""
    wanted = [int(argument) for argument in sys.argv[1:]] or [90, 89, 86]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(compile_one, cases(wanted)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
