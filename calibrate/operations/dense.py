"""Rows of the table: matrix products, the library kernels of a dense layer, whole layers, and what the host does."""

from collections.abc import Iterable
from functools import partial

from calibrate.fit import Fit
from calibrate.operations import lowering, shared
from calibrate.operations.operation import Group, Operation, Parameter, Point, Points, Timed, Value, half_precision
from calibrate.operations.shared import alike, exactly, lasting, powers, sizes
from twin.operations.ops import Engine


def products(
    dtypes: Iterable[str], tokens: Iterable[int], mib: Iterable[int], *, width: int, wide: Iterable[int] = ()
) -> tuple[Point, ...]:
    """Square matrices over tokens, one token through matrices of several MiB, and `wide` ones with as many tokens."""
    rows: list[tuple[Value, ...]] = []
    for dtype in dtypes:
        row_bytes = 4096 * lowering.ELEMENT_BYTES[dtype]
        rows += [(dtype, count, width, width) for count in tokens]
        rows += [(dtype, 1, size * shared.MIB // row_bytes, 4096) for size in mib]
        rows += [(dtype, size, size, size) for size in wide]
    return sizes("dtype", "tokens", "rows", "columns", of=rows)


HALVES, ALL_TYPES = ("bf16", "fp16"), ("fp16", "bf16", "fp32")
PRODUCT = Operation(
    name="product",
    parameters=(shared.DTYPE, shared.TOKENS, Parameter("rows", "m{}"), Parameter("columns", "n{}")),
    probes=("dtype",),
    lower=lowering.product,
    timed=Timed("products", "Product", "products", ("tokens", "rows", "columns")),
    calibrated=Points(
        products(HALVES, powers(4, 13), powers(3, 7), wide=(8192,), width=4096),
        products(HALVES, powers(4, 12, 2), (16, 64), wide=(8192,), width=4096),
        products(ALL_TYPES, (16, 64, 256, 1024), (16, 64), width=2048),
        products(ALL_TYPES, (16, 64, 256, 1024), (16,), width=2048)
    ),
    held_out={"operations": alike(
        products(HALVES, (3, 24, 96, 768, 3_072), (24,), width=4096),
        products(("fp32",), (96,), (24,), width=2048),
        quick=products(HALVES, (24, 768), (24,), width=4096)
    )},
    tolerance=exactly(shared.LIBRARY),
    fits=(Fit(
        part="weights", form="exact", over="tokens", latency="of sizes", lowered=False,
        note="weights read once from memory, 2 operations per weight and token"
    ),),
    probe_s=lasting(2.5, 10),
)  # fmt: skip

DENSE_CPU: dict[str, Value] = {"dtype": "fp32", "shape": shared.CPU_SHAPE}
DENSE_TOKENS, DENSE_QUICK = powers(0, 13), (1, 8, 32, 64, 128, 256, 512, 1024, 8192)
DENSE_TOKENS_CPU = (1, 4, 16, 64, 256)


def tokens_of(gpu: Iterable[int], quick: Iterable[int], cpu: Iterable[int]) -> Points:
    """Tokens of a layer's kernels."""
    on_gpu, on_quick = (sizes("tokens", of=((n,) for n in some), dtype="bf16") for some in (gpu, quick))
    return alike(on_gpu, sizes("tokens", of=((n,) for n in cpu), **DENSE_CPU), quick=on_quick)


HELD_OUT_TOKENS: dict[Group, Points] = {"operations": tokens_of((3, 24, 96, 768, 3_072), (24, 768), (24,))}
LAYER_PART = partial(Operation, parameters=(shared.DTYPE, shared.TOKENS, shared.SHAPE), supported=half_precision)
LINEAR = LAYER_PART(
    name="linear",
    lower=partial(lowering.dense_layer, parts=("weights",)),
    timed=Timed("library", "Linear", "layer", ("tokens",)),
    calibrated=tokens_of(DENSE_TOKENS, DENSE_QUICK, DENSE_TOKENS_CPU),
    held_out=HELD_OUT_TOKENS,
    tolerance=exactly(shared.LIBRARY),
    fits=(Fit(
        part="weights", form="exact", over="tokens", latency="none",
        note="the four products of a layer in a chain; weights read once, 2 operations per weight and token"
    ),),
    probe_s=lasting(2, 10),
)  # fmt: skip
ELEMENTWISE = LAYER_PART(
    name="elementwise",
    lower=partial(lowering.dense_layer, parts=("elementwise",)),
    timed=Timed("library", "Elementwise", "layer", ("tokens",)),
    calibrated=tokens_of((1, 64, 256, 1024, 4096, 8192), (1, 256, 2048, 8192), DENSE_TOKENS_CPU),
    held_out=HELD_OUT_TOKENS,
    tolerance=exactly(shared.SMALL),
    fits=(Fit(
        part="elementwise", form="streamed", over="tokens",
        note="two residual adds with norms, rotation of q and k, and gating; latency of a layer"
    ),),
    probe_s=lasting(2, 7),
)  # fmt: skip
APPEND = LAYER_PART(
    name="append",
    lower=partial(lowering.dense_layer, parts=("append",)),
    timed=Timed("library", "PlainAppend", "layer", ("tokens",)),
    calibrated=tokens_of((1, 256, 2048, 8192), (1, 2048, 8192), DENSE_TOKENS_CPU),
    held_out={"operations": tokens_of((3, 96, 768, 3_072), (96, 3_072), (24,))},
    tolerance=exactly(shared.SMALL),
    fits=(Fit(
        part="append", form="streamed", over="tokens",
        note="K and V of new tokens, read and written to their slots; latency of a layer"
    ),),
    probe_s=lasting(0.5, 2),
)  # fmt: skip
SAMPLE = Operation(
    name="sample",
    parameters=(shared.DTYPE._replace(optional=True), shared.TOKENS),
    lower=lowering.sampling,
    timed=Timed("library", "Sampling", "rows", ("tokens",)),
    calibrated=alike(
        sizes("tokens", of=((1,), (16,), (64,), (256,)), dtype="bf16"),
        sizes("tokens", of=((1,), (4,)), dtype="fp32")
    ),
    held_out={"operations": alike(sizes("tokens", of=((3,), (24,), (96,))), sizes("tokens", of=((3,),)))},
    tolerance=exactly(shared.SMALL),
    fits=(Fit(
        part="sampling", form="streamed", over="tokens",
        note="softmax, noise and argmax over a row of fp32 logits, which are counted as read once"
    ),),
    supported=half_precision, probe_s=lasting(0.3, 1),
)  # fmt: skip

ATTENDED = ("batch", "q_tokens", "past_tokens")


def dense_chunks(*rows: int, past: Iterable[int], **given: Value) -> tuple[Point, ...]:
    """One sequence's new tokens behind each past."""
    of = ((1, q_tokens, before) for before in past for q_tokens in rows)
    return sizes(*ATTENDED, of=of, **({"dtype": "bf16"} | given))


def dense_steps(*pairs: tuple[int, int], **given: Value) -> tuple[Point, ...]:
    """One new token of each sequence: (sequences, context)."""
    return sizes(*ATTENDED, of=((batch, 1, ctx - 1) for batch, ctx in pairs), **({"dtype": "bf16"} | given))


HELD_OUT_STEPS, HELD_OUT_STEPS_CPU = ((1, 12_288), (6, 6_144), (24, 3_072), (96, 1_536)), ((1, 1_536), (6, 384))
STEPS, STEPS_CPU = (
    ((1, 8192), (64, 1024), (1, 131072), (8, 16384), (256, 512), (64, 4096)),
    ((1, 512), (1, 4096), (4, 1024), (16, 256)),
)
FLASH_ATTENTION = partial(
    Operation,
    parameters=(shared.DTYPE, shared.BATCH, shared.Q_TOKENS, shared.PAST, shared.SHAPE),
    lower=partial(lowering.dense_layer, parts=("attention",)),
    timed=Timed("library", "FlashAttention", "layer", ATTENDED),
    tolerance=exactly(shared.FLASH), supported=half_precision, probe_s=lasting(1.5, 7),
)  # fmt: skip
PREFILL_DENSE = FLASH_ATTENTION(
    name="prefill_dense",
    calibrated=alike(
        dense_chunks(512, 2048, 8192, past=(0, 8192, 32768)),
        dense_chunks(64, 256, 512, past=(0,), **DENSE_CPU),  # the CPU's does not mask the future behind a past
        quick=dense_chunks(512, 2048, 8192, past=(0, 8192)),
    ),
    held_out={"operations": alike(
        dense_chunks(768, 1_536, 3_072, past=(0, 4_096, 12_288, 49_152)),
        dense_chunks(96, past=(0,), **DENSE_CPU),
        quick=dense_chunks(768, 3_072, past=(4_096,))
    )},
    fits=(Fit(
        part="attention", form="least_squares", over="rows",
        note="causal chunks over several pasts; operations of masked pairs are not counted"
    ),),
)  # fmt: skip
DECODE_DENSE = FLASH_ATTENTION(
    name="decode_dense",
    calibrated=alike(
        dense_steps(*STEPS), dense_steps(*STEPS_CPU, **DENSE_CPU), quick=dense_steps(*STEPS[:2], *STEPS[3::2])
    ),
    held_out={"operations": alike(
        dense_steps(*HELD_OUT_STEPS), dense_steps(*HELD_OUT_STEPS_CPU, **DENSE_CPU),
        quick=dense_steps(*HELD_OUT_STEPS[::2])
    )},
    fits=(
        Fit(part="attention", form="least_squares", over="query_tokens", note="all batches and contexts in one fit"),
    ),
)  # fmt: skip
LAYER = Operation(
    name="layer",
    parameters=(shared.DTYPE, shared.BATCH, shared.Q_TOKENS, shared.PAST, shared.SHAPE),
    lower=lowering.dense_layer,
    timed=Timed("library", "DenseLayers", "layer", ATTENDED),
    held_out={"operations": alike(
        (*dense_steps(*HELD_OUT_STEPS), *dense_chunks(768, past=(0,)), *dense_chunks(3_072, past=(4_096,)),
         *dense_chunks(1_536, past=(20_480,))),
        (*dense_steps(*HELD_OUT_STEPS_CPU, **DENSE_CPU), *dense_chunks(96, past=(0,), **DENSE_CPU)),
        quick=(*dense_steps(*HELD_OUT_STEPS[::2]), *dense_chunks(3_072, past=(4_096,)))
    )},
    tolerance=exactly(shared.LIBRARY), supported=half_precision,
    rounds_often=3.0,  # rounds that much more often than a product
)  # fmt: skip

# Host memory and disk: a quick calibration has no time for them

ROWS_READ = (("ram", 3), ("ram", 24), ("ram", 768), ("disk", 3), ("disk", 24), ("disk", 96))
"""From a file of which few pages are read: neighbours in a table of the real size share none."""
ROWS_CALIBRATED = tuple(
    point
    for source, counts in (("ram", (1, 16, 64, 256, 4096)), ("disk", (1, 4, 16, 64)))
    for point in sizes("tokens", of=((count,) for count in counts), source=source)
)
DISK_ROWS = Operation(
    name="disk_rows",
    parameters=(Parameter("source", choices=("ram", "disk")), shared.TOKENS),
    lower=lowering.disk_rows,
    timed=Timed("disk_rows", "ReadRows", "table", (), fresh=True),
    calibrated=Points(gpu=ROWS_CALIBRATED, cpu=ROWS_CALIBRATED),
    held_out={"operations": alike(
        sizes("source", "tokens", of=ROWS_READ), sizes("source", "tokens", of=ROWS_READ[1::2])
    )},
    tolerance=exactly(shared.HOST_MEMORY),
    fits=(
        Fit(
            part="ngram", form="streamed", over="tokens", between_runs=0.08, kept=lambda at: at["source"] == "ram",
            note="16 rows of 102 bytes a token, selected by as many threads as torch takes; latency of a request"
        ),
        Fit(
            part="ngram", form="least_squares", over="tokens", kept=lambda at: at["source"] == "disk",
            note="16 rows a token by 8 threads, each of which waits for one page of 4 KiB after the other, none in the "
            "system's cache; latency of a request: order, threads, gathering of answers"
        ),
    ),
    probe_s=lasting(0.1, 8),
)  # fmt: skip


def images(layers: Iterable[int], *parts: tuple[int, int]) -> tuple[Point, ...]:
    """Of both tiers: whole pages of so many layers, then (layers, tokens) of pages that end planes."""
    return tuple(
        {"tier": tier, **size}
        for tier in ("vram", "host")
        for size in (*sizes("layers", of=((n,) for n in layers)), *sizes("layers", "rows", of=parts))
    )


IMAGES_CALIBRATED = images((1, 8), (8, 16))
IMAGE_NOTE = "images are pageable, and every copy is waited for"
IMAGES_VARY = 0.18
"""Four runs on one H200: the same image took 0.65 to 1.35 times as long as in another. Rates are of three together."""
IMAGES = tuple(
    Operation(
        name=name,
        parameters=(shared.TIER, shared.LAYERS, Parameter("rows", "r{}", optional=True, least=4)),
        lower=partial(lowering.page_image, engine=engine),
        timed=Timed("page_images", timed, "planes", ()),
        calibrated=Points(gpu=IMAGES_CALIBRATED, cpu=IMAGES_CALIBRATED),
        held_out={"operations": alike(images((12, 2), (6, 96)), images((12, 2), (6, 96)))},
        tolerance=exactly(shared.HOST_MEMORY),
        fits=(
            Fit(
                part="image", form="least_squares", over="tokens", between_runs=IMAGES_VARY,
                note=f"planes in device memory, a copy each; {IMAGE_NOTE}; latency of a copy"
            ),
            Fit(
                part="image_in_host", form="least_squares", over="tokens", between_runs=IMAGES_VARY,
                note="offloaded planes, read and written in host memory, a copy each; latency of a copy"
            ),
        ),
        probe_s=lasting(0.1, 4.8),
    )
    for name, timed, engine in (("evict_page", "EvictPages", Engine.D2H), ("restore_page", "RestorePages", Engine.H2D))
)  # fmt: skip
