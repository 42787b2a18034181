"""Work that a host's processor does in a device's place, and what crosses the link for it.

A processor multiplies as fast as it reads: matrices once a pass, keys and values once for every row of queries, since
its loop takes one row at a time. So its work is counted in bytes read, of which its kernels (`llama.cpp_cpu`) reach a
share of the host's memory rate. 512 tokens of a 7B took 2.0 s more with the cache on the host
(ggml-org/llama.cpp#4812), and 68.7 GB are counted here: 34 GB/s.
"""

from msgspec.structs import replace

from twin.ask.case import Case
from twin.operations.counts import FULL_BYTES
from twin.operations.ops import HOST_DEVICE, Engine, Op


def on_processor(case: Case, op: Op) -> Op:
    """The same work by the processor; what crosses a link stays as it is."""
    if op.engine is not Engine.SM or case.rules.cells is None:
        return op
    operation, _, fmt = op.kernel.split("/")
    read = op.vram_bytes
    if operation.startswith("attend") and case.mixer is not None:
        operation, read = "attend_decode", op.flops / 2 * case.plane_bytes / case.mixer.kv_elements
    return replace(
        op,
        device=HOST_DEVICE,
        engine=Engine.HOST,
        kernel=f"{operation}/{case.rules.cells.cpu}/{fmt}",
        vram_bytes=0,
        host_bytes=read,
        flops=0,
        dequantised_elements=0,
        row_tile=0,
    )


def visited(ops: tuple[Op, ...], device: int, *, down_bytes: float, up_bytes: float) -> tuple[Op, ...]:
    """A chain on the processor between what a device sends and what it gets back; their order is set where they lie."""
    down = Op("hop", device, engine=Engine.D2H, link_bytes=down_bytes)
    return (down, *ops, Op("hop", device, engine=Engine.H2D, link_bytes=up_bytes))


def products(case: Case, op: Op, device: int, *, hidden: int) -> tuple[Op, ...]:
    """Products with weights of the host in a layer of `device`, which may be the host too."""
    if comes_up(case, op.grain):
        return from_host(op)
    by_processor = (on_processor(case, op),)
    moved = op.grain * hidden * FULL_BYTES
    return by_processor if device == HOST_DEVICE else visited(by_processor, device, down_bytes=moved, up_bytes=moved)


def comes_up(case: Case, tokens: float) -> bool:
    """Whether a pass of so many tokens is worth the way of weights and caches of the host's layers to a device."""
    return case.rules.cells is not None and tokens >= case.rules.cells.offloads_from


def from_host(op: Op) -> tuple[Op, Op]:
    """What a device reads crosses the link before it."""
    device = max(0, op.device)
    return Op(op.part, device, engine=Engine.H2D, link_bytes=op.vram_bytes), replace(op, device=device)


def chained(ops: tuple[Op, ...], *, first: int) -> tuple[Op, ...]:
    """Ops as a chain after op `first` - 1."""
    return tuple(replace(op, after=(at - 1,) if at else ()) for at, op in enumerate(ops, start=first))
