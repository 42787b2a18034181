"""Compiles the decode attention of every codec for several compute capabilities, on any machine; prints what it needs.

PYTHONPATH=. python tests/gpu/format_suite_compile.py [90 86 ...]
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from realkernels.codecs import arrangements, codec_named
from realkernels.kernels.split_kv import PlanCase, alignment
from realkernels.timed.attend_decode import attended

CPU = torch.device("cpu")
SHARED_BYTES = {80: 163, 86: 99, 89: 99, 90: 227}
"""KiB that a thread block may have."""
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int16: "*i16",
}  # fmt: skip
SIZES = ((4, 256, 256, 1), (4, 256, 256, 4), (4, 256, 256, 8), (8, 128, 128, 4))
"""KV heads, head size, tokens of a page, query tokens."""


def build(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any], capability: int) -> Any:
    """The compiled kernel of a launch, its hardware's instructions used."""
    named = {**named, "ASM": True} if "ASM" in kernel.arg_names else dict(named)
    options = {"num_warps": named.pop("num_warps")}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for param in kernel.params:
        value = values[param.name]
        if param.is_constexpr:
            signature[param.name], constants[(param.num,)] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[param.name] = TYPES[value.dtype] if is_tensor else {int: "i32", float: "fp32"}[type(value)]
        number = value.data_ptr() if is_tensor else value
        if not param.do_not_specialize and isinstance(number, int) and number % 16 == 0:
            attributes[(param.num,)] = [["tt.divisibility", 16]]
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
    """What one codec's kernel needs of a multiprocessor."""
    name, arrangement, heads, dim, page, q_tokens, capability = case
    codec, launches = codec_named(name, arrangement=arrangement), []
    form = codec.decode_form
    JITFunction.run = lambda self, *given, grid, warmup, **named: launches.append((self, given, named))  # noqa: ARG005
    more = {"side_tiles": 4, "sinks": ()} if form.paged else {}
    views = codec.views(codec.allocate(2, page, heads, dim, CPU, **more))
    plan = form.plan(
        PlanCase(
            q_rows=24 // heads * q_tokens, head_dim=dim, aligned=alignment(views["key_data"], views["value_data"]),
            per_token="key_scale" in views and views["key_scale"].dim() > 1, tile_tokens=codec.tile_tokens,
            large=capability >= 90, warpgroups=capability // 10 == 9,
        )
    )  # fmt: skip
    query = torch.zeros(1, q_tokens, 24, dim, dtype=torch.float16 if name == "fp16" else torch.bfloat16)
    workspace = plan.workspace(
        batch=1, q_tokens=q_tokens, query_heads=24, kv_heads=heads, head_dim=dim, tokens=4096,
        other_splits=form.other_splits, device=CPU,
    )  # fmt: skip
    form.attend(
        query, views, torch.zeros(1, 16, dtype=torch.int32), torch.ones(1, dtype=torch.int32), query, workspace,
        plan=plan, page_tokens=page, softmax_scale=1.0,
    )  # fmt: skip
    title = f"sm_{capability} {name:20s} {arrangement:8s} {heads} x {dim} page {page:3d} q {q_tokens:2d}"
    compiled = build(*launches[0], capability)
    fits = "" if compiled.metadata.shared <= SHARED_BYTES[capability] * 1024 else "  DOES NOT FIT"
    return f"{title}: {resources(compiled)}{fits}"


def cases(capabilities: list[int]) -> Iterator[tuple[str, str, int, int, int, int, int]]:
    """Kernels, without those that a capability has no instructions for."""
    for capability in capabilities:
        for name in attended():
            if divmod(capability, 10) >= codec_named(name).decode_form.least_capability:
                yield from ((name, kept, *sizes, capability) for kept in arrangements(name) for sizes in SIZES)


def main() -> None:
    """Compile all, print a line each."""
    wanted = [int(argument) for argument in sys.argv[1:]] or [90, 89, 86]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(compile_one, cases(wanted)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
