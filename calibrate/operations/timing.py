"""How a point becomes a timed call, the one loop (open, verify, capture, time, check again), and the table's probes.

Classes of `realkernels/timed/` are loaded when the first call is made: nothing else here needs torch.
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.machine.description import Machine
from calibrate.operations.lowering import ELEMENT_BYTES, PAGE_TOKENS, numbers
from calibrate.operations.operation import Operation, Point, Timed, Value
from calibrate.operations.table import OPERATIONS
from calibrate.probes import CannotRun, Context, Probe, Sample, check, cuda_only
from twin.units import MIB

if TYPE_CHECKING:
    from realkernels.timed.call import TimedCall

LEAST_LAYERS, LAYERS, LIGHT_LAYERS = 2, 4, 8
"""Of a decode step at the least; of a dense model's products, 1.7 GB on a GPU; and of kernels without weights."""
MANY_TOKENS = 256
"""New tokens from which on so many are appended to fewer layers."""
VOCABULARY, ROW_BYTES = 128_256, 102
TABLE_ROWS, TABLES = 2**20, 4
"""Of a table on a processor, and how many times as large it is beside a GPU: beyond the caches of its host."""
IMAGES_MIB = 256, 64
"""Of images of whole pages that one run copies, and of their planes, beyond the caches of a GPU's host and of a
processor."""
GPU_SHARE, CPU_SHARE = 0.5, 0.2
"""Of the free memory that what a point needs may take: on a processor both tiers share one, with others."""


class Measured(NamedTuple):
    """A timed point."""

    sample: Sample
    error: float
    link_bytes: int


def loaded(module: str, name: str) -> Any:
    """A class or a function of the kernels' room."""
    return getattr(import_module(f"realkernels.{module}"), name)


def _made(timed: Timed, *given: Any, **sizes: Any) -> "TimedCall":
    """The call that an operation times."""
    call: TimedCall = loaded(f"timed.{timed.module}", timed.name)(*given, **sizes)
    return call


Pair = tuple[Operation, Point]


def measured(context: Context, pairs: Sequence[Pair], *, whole: bool) -> Iterator[Measured]:
    """Time points of operations one by one, those that share what is opened together, until `context` is late.

    Seconds are of one call, or of all layers where the operation is `layered` and `whole` is asked for.
    WrongData where a result is wrong; RuntimeError and MemoryError where there is no room; CannotRun without a kernel.
    """
    for key, group in groupby(context.points(pairs), key=shared_by):
        with _opened(context, [pair for pair in pairs if shared_by(pair) == key]) as shared:
            for operation, point in group:
                yield _timed(context, operation, point, _call(context, operation, point, shared), whole=whole)


def _timed(context: Context, operation: Operation, point: Point, call: "TimedCall", *, whole: bool) -> Measured:
    where, worst = operation.id(point), operation.worst_error(point)
    error = call.verify()
    check(where, error <= worst, f"relative error {error:.1e}")
    by_host = not call.capturable
    work = call.run if by_host else context.backend.capture(call.run)
    of_run = call.calls if whole and operation.layered else 1
    seconds = context.seconds(
        work, before=call.poison if operation.timed.fresh else None, per=call.calls // of_run,
        clock=loaded("device", "HostClock")() if by_host else None,
    )  # fmt: skip
    call.poison()
    work()
    error = max(error, call.error())
    how = check(where, error <= worst, f"relative error {error:.1e}")
    sample = Sample(at=dict(point), seconds=seconds, moved_bytes=call.moved_bytes, flops=call.flops, checked=how)
    return Measured(sample, error, int(call.link_bytes * of_run))


SHARED = {"planes": ("tier", "format", "layers", "budget", "rows"), "table": ("source",), "layer": ("dtype", "shape")}
"""What points agree in that are timed over one cache, one table or the same weights."""


def shared_by(pair: Pair) -> tuple[Value, ...]:
    """Equal for points that are timed over the same; of other kinds each has all of its own."""
    operation, point = pair
    over = operation.timed.over
    kind = "images" if operation.timed.module == "page_images" else over if over == "planes" else operation.name
    return (kind, *(point.get(name, "") for name in SHARED.get(over, tuple(point))))


# What is opened for points together


def _opened(context: Context, pairs: Sequence[Pair]) -> AbstractContextManager[Any]:
    (timed, *_), (first, *_) = ([operation.timed for operation, _ in pairs], [point for _, point in pairs])
    if timed.over == "planes":
        return _planes(context, [point for _, point in pairs])
    if timed.over == "table":
        return _table(context, str(first["source"]))
    return nullcontext(_weights(context, first) if timed.name == "Linear" else None)


@contextmanager
def _planes(context: Context, points: Sequence[Point]) -> Iterator[Any]:
    """A filled cache of one sequence that holds every point."""
    from realkernels.shape import QsaShape  # noqa: PLC0415

    first = points[0]
    tokens = max(int(point.get("ctx_tokens") or _imaged(context, point).tokens) for point in points)
    shape = QsaShape(budget=int(first["budget"])) if "budget" in first else QsaShape()
    given = {"layers": int(first.get("layers", 1)), "device": context.backend.device, "folder": str(context.folder)}
    if "format" in first:
        opened = loaded("caches.interleaved", "interleaved_cache")
        with opened(str(first["format"]), shape=shape, tokens=tokens, **given) as cache:
            yield cache
        return
    given |= {"tier": "vram" if first["tier"] == "vram" else "host", "huge_pages": first["tier"] != "host4k"}
    held = tokens if "rows" in first else -(-tokens // PAGE_TOKENS) * PAGE_TOKENS  # a last page of a few rows
    with loaded("caches.qsa", "qsa_cache")(shape, tokens=held, **given) as cache:
        cache.fill_random(seed=tokens)
        yield cache


@contextmanager
def _table(context: Context, source: str) -> Iterator[Any]:
    """A table of random rows, in RAM or in a file of the folder."""
    with tempfile.TemporaryDirectory(dir=str(context.folder)) as folder:
        path = Path(folder) / "rows"
        tables = TABLES if context.cuda else 1
        with path.open("wb") as made:
            for _ in range(tables):
                made.write(os.urandom(TABLE_ROWS * ROW_BYTES))
            made.flush()
            os.fsync(made.fileno())  # the system drops no page that is still to be written
        file = loaded("timed.disk_rows", "RowFile")(path=path, rows=tables * TABLE_ROWS, row_bytes=ROW_BYTES)
        with loaded("timed.disk_rows", "open_table")(file, "ram" if source == "ram" else "pread") as table:
            yield table


class _Imaged(NamedTuple):
    """Pages whose images are copied, and their tokens."""

    pages: int
    tokens: int


def _imaged(context: Context, point: Point) -> _Imaged:
    """As many whole pages as caches do not hold, or the single one of a point that names its rows."""
    from realkernels.shape import QsaShape  # noqa: PLC0415

    if "rows" in point:
        return _Imaged(1, int(point["rows"]))
    shape = QsaShape()
    elements = 2 * shape.kv_heads * shape.head_dim + shape.index_dim + shape.index_dim // shape.ratio
    page_bytes = PAGE_TOKENS * elements * ELEMENT_BYTES[context.machine.dtype] * int(point["layers"])
    pages = -(-IMAGES_MIB[not context.cuda] * MIB // page_bytes)
    return _Imaged(pages, pages * PAGE_TOKENS)


def _weights(context: Context, point: Point) -> list[Any]:
    """Of as many layers as fit, four at most."""
    layer_bytes = _shape(point).parameters * ELEMENT_BYTES[str(point["dtype"])]
    count = max(1, min(LAYERS, int(_room(context, point) / layer_bytes)))
    made = loaded("timed.library", "random_weights")
    return [made(_shape(point), dtype=_dtype(point), device=context.backend.device) for _ in range(count)]


# One call


def _call(context: Context, operation: Operation, point: Point, shared: Any) -> "TimedCall":
    timed, device = operation.timed, context.backend.device
    given: dict[str, Any] = {name: point[name] for name in timed.sizes if name in point}
    made: TimedCall
    if timed.over == "planes":
        if "backbone_mib" in point:
            given["backbone_bytes"] = int(point["backbone_mib"]) * MIB
        if timed.module == "page_images":
            given["pages"] = _imaged(context, point).pages
        over = timed._replace(module="sparse", name="GatherBlocks") if "format" in point else timed
        made = _made(over, shared, **given)
    elif timed.over == "format":
        made = _format_call(context, operation, point, given)
    elif timed.over == "table":
        made = _made(timed, shared, reads=16 * int(point["tokens"]))
    elif timed.over == "rows":
        made = _made(timed, vocab=VOCABULARY, device=device, **given)
    elif timed.over == "products":
        beyond = (512 if context.cuda else 128 if point["tokens"] == 1 else 32) * MIB
        made = _made(timed, dtype=_dtype(point), beyond_bytes=beyond, device=device, **given)
    else:
        made = _layer_call(context, operation, point, given, shared)
    return made


def _format_call(context: Context, operation: Operation, point: Point, given: dict[str, Any]) -> "TimedCall":
    """Over a cache of the point's format. CannotRun where this device has no kernel for it."""
    if "heads" in point:
        given["shape"] = _heads(point)
    if "arrangement" in point:
        given["arrangement"] = point["arrangement"]
    if operation.timed.name == "Append":
        given["layers"] = LIGHT_LAYERS if context.cuda and int(point["tokens"]) < MANY_TOKENS else LEAST_LAYERS
    if operation.timed.name == "AttendChunk":
        given["caches"] = 1
    return _made(operation.timed, str(point["format"]), device=context.backend.device, **given)


def _heads(point: Point) -> Any:
    from realkernels.shape import AttentionShape  # noqa: PLC0415

    query_heads, kv_heads, head_dim = numbers(point["heads"])
    return AttentionShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)


def _layer_call(
    context: Context, operation: Operation, point: Point, given: dict[str, Any], weights: list[Any] | None
) -> "TimedCall":
    """Of a dense layer. CannotRun where flash attention cannot run here."""
    timed, device, shape = operation.timed, context.backend.device, _shape(point)
    given |= {"dtype": _dtype(point), "device": device}
    if timed.name in {"FlashAttention", "DenseLayers"}:
        missing = loaded("timed.library", "flash_missing")(shape, dtype=given["dtype"], device=device)
        if missing:
            raise CannotRun(missing)
    if timed.name == "FlashAttention":
        ((attend,),) = (block.ops for block in operation.lower(point, context.machine.dtype))
        beyond = (512 if context.cuda else 64) * MIB / attend.vram_bytes
        given["caches"] = max(2, min(16 if point["q_tokens"] == 1 else LAYERS, round(beyond)))
    elif timed.name == "Linear":
        given["weights"] = weights
    else:
        given["layers"] = LAYERS if timed.name == "DenseLayers" else LIGHT_LAYERS
    return _made(timed, shape, **given)


def _shape(point: Point) -> Any:
    from realkernels.shape import DenseShape  # noqa: PLC0415

    if "shape" not in point:
        return DenseShape()
    names = ("hidden", "query_heads", "kv_heads", "head_dim", "intermediate")
    return DenseShape(**dict(zip(names, numbers(point["shape"]), strict=True)))


def _dtype(point: Point) -> Any:
    import torch  # noqa: PLC0415

    return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[str(point["dtype"])]


# What fits


def fitting(context: Context, operation: Operation, points: Iterable[Point]) -> list[Pair]:
    """Points that this machine's free memory holds, with fewer layers where it must be, two at the least.

    Of a cache that several points share the longest context sets the layers; one point is always left.
    """
    every = [(operation, point) for point in points]
    kept = [pair for pair in every if _bytes(context, pair, LEAST_LAYERS) <= _room(context, pair[1])] or every[:1]
    most: dict[tuple[Value, ...], int] = {}
    for pair in kept:
        layers = int(_room(context, pair[1]) / max(1.0, _bytes(context, pair, 1)))
        most[shared_by(pair)] = min(layers, most.get(shared_by(pair), layers))
    return [
        (operation, {**point, "layers": max(1, min(int(point["layers"]), most[shared_by((operation, point))]))})
        if "layers" in point else (operation, point)
        for _, point in kept
    ]  # fmt: skip


def _room(context: Context, point: Point) -> float:
    machine = context.machine
    if not context.cuda:
        return CPU_SHARE * machine.host_free_bytes
    in_vram = point.get("tier", "vram") == "vram"
    return GPU_SHARE * (machine.device_free_bytes if in_vram else machine.host_free_bytes)


def _bytes(context: Context, pair: Pair, layers: int) -> float:
    """What a point needs, roughly: planes of all layers, or what its largest op reads."""
    operation, point = pair
    if operation.timed.over != "planes":
        program = operation.lower(point, context.machine.dtype)
        return max(op.vram_bytes * op.calls for block in program for op in block.ops)
    from realkernels.shape import QsaShape  # noqa: PLC0415

    shape, tokens = QsaShape(), int(point.get("ctx_tokens") or _imaged(context, point).tokens)
    elements = 2 * shape.kv_heads * shape.head_dim + shape.index_dim
    elements += shape.index_dim // shape.ratio if point["tier"] == "vram" else 0
    return float(tokens * elements * ELEMENT_BYTES[context.machine.dtype] * (layers if "layers" in point else 1))


KINDS = {"AttendDecode": ("decode", "q_tokens"), "Append": ("append", "tokens"), "Dequantise": ("dequantise", "")}
"""Of kernels that are compiled ahead, with the parameter that they are compiled anew for."""
KV_CHUNK_TOKENS = 8192


def compiled(device: str, wanted: Iterable[Pair]) -> list[str]:
    """Compile the kernels of points over cache formats side by side; why some could not be, in lines."""
    kernels = []
    for operation, point in wanted:
        kind, number = KINDS.get(operation.timed.name, ("", ""))
        if kind:
            name = str(point["format"])
            arrangement = point.get("arrangement") or loaded("codecs", "default_arrangement")(name)
            count = int(point.get(number, KV_CHUNK_TOKENS))
            kernels.append(loaded("timed.compile_ahead", "Wanted")(name, arrangement, count, kind))
    told: list[str] = loaded("timed.compile_ahead", "compile_ahead")(kernels, device=device) if kernels else []
    return told


def settle(operations: Iterable[Operation]) -> None:
    """Load what times them, and set all that is loaded aside: no `release` spends a tenth of a second on it."""
    for module in {operation.timed.module for operation in operations}:
        import_module(f"realkernels.timed.{module}")
    gc.collect()
    gc.freeze()


def release() -> None:
    """The next point's caches may be as large as all that is free."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


# Probes: one for every operation and every value of what its points are sorted by


def compile_all(context: Context) -> list[Sample]:
    """All kernels over formats compiled side by side, so that what follows is not made of waiting for compilers."""
    wanted = [
        (operation, point)
        for operation in OPERATIONS
        for point in _points(operation, context.machine, quick=context.quick)
        if not operation.supported(point, context.machine)
    ]
    begin = time.monotonic()
    failed = compiled(str(context.backend.device), wanted)
    took = time.monotonic() - begin
    return [Sample(at={"points": len(wanted)}, seconds=(took,), checked="; ".join(failed) or "all compiled")]


def _points(operation: Operation, machine: Machine, *, quick: bool) -> tuple[Point, ...]:
    return operation.calibration(cuda=machine.is_cuda, quick=quick, multiprocessors=machine.sm_count)


def _run(context: Context, *, operation: Operation, name: str) -> list[Sample]:
    """Samples of the probe's points. CannotRun where this device has no kernel for them."""
    points = [p for p in _points(operation, context.machine, quick=context.quick) if operation.probe(p) == name]
    try:
        return [each.sample for each in measured(context, fitting(context, operation, points), whole=False)]
    except RuntimeError as refused:
        if type(refused).__name__ == "NoKernel":
            raise CannotRun(str(refused)) from None
        raise


def _supported(machine: Machine, *, operation: Operation, point: Point, name: str) -> str:
    reason = operation.supported(point, machine)
    if reason or any(operation.probe(each) == name for each in _points(operation, machine, quick=False)):
        return reason
    return "nothing on a GPU uses it" if machine.is_cuda else "nothing on a processor uses it"


def table_probes() -> tuple[Probe, ...]:
    """Every one, in the order of the table; kernels of formats are compiled first."""
    found = [Probe(name="compiled_kernels", run=compile_all, supported=cuda_only, quick_s=36.0, full_s=45.0)]
    for operation in OPERATIONS:
        firsts: dict[str, Point] = {}
        for point in operation.calibrated.every():
            firsts.setdefault(operation.probe(point), point)
        for name, point in firsts.items():
            run = partial(_run, operation=operation, name=name)
            supported = partial(_supported, operation=operation, point=point, name=name)
            quick_s, full_s = operation.probe_s(point)
            found.append(Probe(name=name, run=run, supported=supported, quick_s=quick_s, full_s=full_s))
    return tuple(found)
