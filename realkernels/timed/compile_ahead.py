"""Compiling the kernels of many codecs at once, in processes of their own: one after the other they take minutes.

Triton keeps what it has compiled in a folder, where the process that times it finds it. As a program it compiles what
the lines of its standard input name: a codec, an arrangement, a number and a kind of kernel.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]
MOST_PROCESSES = 14
CTX_TOKENS = 512
COMBINED_SPLITS = (1, 2, 4, 8, 16, 32, 64)
"""The combining kernel is compiled anew for each power of two up to this."""

COMBINED_ORDERS = ((1, False), (2, False), (4, False), (4, True))
"""And for each order of the elements of partial results: codes a word, those of GGML or not."""

Kind = Literal["decode", "append", "dequantise", "combine"]
"""Attention, new tokens into a cache, a kv chunk of it dequantised, partial results combined."""


class Wanted(NamedTuple):
    """One kernel of a codec; one that combines has none, and is named by `bf16` or `fp16`, as the queries are."""

    codec_name: str
    arrangement: str
    number: int
    """Query tokens of a decode, new tokens of an append, splits of a combine, tokens of a kv chunk."""
    kind: Kind = "decode"


def compile_ahead(wanted: Iterable[Wanted], *, device: str) -> list[str]:
    """Compile what is wanted on `device` ("cuda:0"), combining kernels beside decodes; why some could not, in lines.

    A kernel that cannot be compiled here is met again, with its error, by whoever wants to run it.
    """
    kernels = list(dict.fromkeys(wanted))
    dtypes = {"fp16" if kernel.codec_name == "fp16" else "bf16" for kernel in kernels if kernel.kind == "decode"}
    kernels += [Wanted(dtype, "aligned", splits, "combine") for dtype in sorted(dtypes) for splits in COMBINED_SPLITS]
    count = max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1, len(kernels)))
    shares = [kernels[first::count] for first in range(count)]
    with ExitStack() as stack:
        begun = [_begun(share, device, stack) for share in shares]
        failed = [told for process, told in begun if process.wait() != 0]
        return [_last_line(told) for told in failed]


def _begun(share: list[Wanted], device: str, stack: ExitStack) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """(a process that compiles the share, what it says); both are done with when `stack` is left."""
    asked, told = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))  # noqa: SIM115
    asked.write("".join(f"{' '.join(str(part) for part in kernel)}\n" for kernel in share).encode())
    asked.seek(0)
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    process = stack.enter_context(
        subprocess.Popen(  # noqa: S603 - this file itself
            [sys.executable, "-m", "realkernels.timed.compile_ahead", device],
            stdin=asked, stderr=told, env=os.environ | {"PYTHONPATH": path},
        )
    )  # fmt: skip
    return process, told


def _last_line(told: IO[bytes]) -> str:
    told.seek(0)
    words = told.read().decode(errors="replace").strip()
    return words.splitlines()[-1] if words else "a compiling process ended without a word"


def main() -> None:
    """Compile what standard input names on the device that the first argument names."""
    import torch  # noqa: PLC0415

    device = torch.device(sys.argv[1])
    torch.cuda.set_device(device)
    failed = []
    for line in sys.stdin:
        name, arrangement, number, given = line.split()
        kind = next(known for known in get_args(Kind) if known == given)
        try:
            _compile(Wanted(name, arrangement, int(number), kind), device)
        except Exception as wrong:  # noqa: BLE001 - whatever it is, the others are still to be compiled
            failed.append(f"{line.strip()}: {type(wrong).__name__}: {str(wrong).splitlines()[0]}")
    if failed:
        sys.stderr.write("; ".join(failed) + "\n")
        sys.exit(1)


def _compile(wanted: Wanted, device: "torch.device") -> None:
    import torch  # noqa: PLC0415

    from realkernels.timed.append import Append  # noqa: PLC0415
    from realkernels.timed.attend_decode import AttendDecode  # noqa: PLC0415
    from realkernels.timed.prefill import Dequantise  # noqa: PLC0415

    number: int = wanted.number
    given: dict[str, Any] = {"arrangement": wanted.arrangement, "device": device}
    if wanted.kind == "decode":
        AttendDecode(wanted.codec_name, ctx_tokens=CTX_TOKENS, q_tokens=number, caches=1, **given).run()
    elif wanted.kind == "append":
        Append(wanted.codec_name, tokens=number, layers=1, **given).run()
    elif wanted.kind == "dequantise":
        Dequantise(wanted.codec_name, tokens=number, **given).run()
    else:
        _combine(wanted.codec_name, number, device)
    torch.cuda.synchronize(device)


def _combine(name: str, splits: int, device: "torch.device") -> None:
    """In every order and width of partial results."""
    import torch  # noqa: PLC0415

    from realkernels.kernels.split_kv import FEW_ROWS_BLOCK, Workspace, combine_splits  # noqa: PLC0415
    from realkernels.shape import AttentionShape  # noqa: PLC0415
    from realkernels.timed.attend_decode import query_dtype  # noqa: PLC0415

    heads, dim = AttentionShape().query_heads, AttentionShape().head_dim
    space = Workspace.allocate(batch=1, q_tokens=1, query_heads=heads, head_dim=dim, splits=splits, device=device)
    out = torch.empty(1, 1, heads, dim, dtype=query_dtype(name, device), device=device)
    for block in (FEW_ROWS_BLOCK, dim):
        for per_word, ggml in COMBINED_ORDERS[: 1 if name == "fp16" else None]:
            combine_splits(space, out, per_word=per_word, ggml=ggml, block=block)


if __name__ == "__main__":
    main()
