"""Compiles the launches of one gather for compute capability 9.0 and prints the order of what matters in each.

python -m tests.realkernels.kernels.pdl_code FORMAT, without TRITON_INTERPRET; no device is needed.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from realkernels.caches.interleaved import block_layout, block_planes
from realkernels.codecs import codec_named
from realkernels.kernels import gather
from realkernels.kernels.gather import InterleavedGather
from realkernels.shape import QsaShape

CPU = torch.device("cpu")
SHAPE = QsaShape()
TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8",
}  # fmt: skip
SIGNS = {"ld.global": "l", "st.global": "s", "griddepcontrol.wait": "W", "griddepcontrol.launch_dependents": "N"}


class Compiled:
    """Stands where a kernel is launched, and compiles it instead."""

    def __init__(self, kernel: Any, order: list[str]) -> None:
        self.kernel, self.order = kernel, order

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._compile

    def _compile(self, *arguments: Any, **named: Any) -> None:
        options = {key: named.pop(key) for key in ("num_warps", "num_stages", "launch_pdl") if key in named}
        names = self.kernel.arg_names
        signature = dict.fromkeys(names, "constexpr")
        for name, value in zip(names, arguments, strict=False):
            is_tensor = isinstance(value, torch.Tensor)
            signature[name] = TYPES[value.dtype] if is_tensor else {int: "i32", float: "fp32"}[type(value)]
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, value in enumerate(arguments) if isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0
        }  # fmt: skip
        constants = {(names.index(name),): value for name, value in named.items()}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        pattern = "|".join(re.escape(word) for word in SIGNS)
        self.order.append("".join(SIGNS[word] for word in re.findall(pattern, code)))


def main() -> None:
    """One line of JSON: a string a launch."""
    codec = codec_named(sys.argv[1])
    size = {"block_tokens": SHAPE.ratio, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim}
    memory = torch.zeros(1024, block_layout(codec, **size).stride, dtype=torch.uint8)
    planes, made = block_planes(codec, blocks=1024, memory=memory, **size), InterleavedGather(codec, SHAPE, device=CPU)
    made.pdl = True
    query = torch.zeros(SHAPE.query_heads, SHAPE.head_dim).half()
    selected = torch.arange(SHAPE.topk).int()
    order: list[str] = []
    for name in ("_rotate", "_attend_interleaved", "_combine_splits"):
        setattr(gather, name, Compiled(getattr(gather, name), order))
    made.run(query, planes, selected, 4_095, torch.empty_like(query))
    print(json.dumps(order))


if __name__ == "__main__":
    main()
