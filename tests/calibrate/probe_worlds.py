"""A machine to solve on paper and probe records that its rates would give: no torch, no device."""

from calibrate.machine.description import Machine
from calibrate.probes import Context, Probe, ProbeRecord, Sample

VRAM, TENSOR, LINK, DISK = 1e12, 100e12, 20e9, 1e9
COPY_LATENCY_S, QUEUE_START_S = 4e-6, 9e-6
GATHER_LATENCY_S, SELECT_LATENCY_S = 10e-6, 8e-6
CONTEXTS = (4096, 32768, 262144, 1048576)
EFFICIENCY = dict(zip(CONTEXTS, (0.3, 0.4, 0.6, 0.7), strict=True))


def machine(**changes: object) -> Machine:
    """An idle GPU machine; `changes` replace its fields. A CPU has one memory."""
    fields: dict[str, object] = {
        "device": "cuda:0", "name": "Toy 9000", "compute_capability": "9.0", "sm_count": 100,
        "device_bytes": 80 * 2**30, "device_free_bytes": 79 * 2**30, "host_bytes": 128 * 2**30,
        "host_free_bytes": 120 * 2**30, "dtype": "fp16", "device_id": "toy-1", "driver": "1.2",
        "versions": {"torch": "2.11"}, "huge_pages": "madvise", "cpu": "Toy CPU", "cpu_count": 8, "code": "abc",
        "smi": {"utilization.gpu": "0", "pcie.link.gen.max": "5", "pcie.link.width.max": "16"},
    }  # fmt: skip
    one = {"device_bytes": fields["host_bytes"]} if changes.get("device") == "cpu" else {}
    return Machine(**fields | one | changes)  # type: ignore[arg-type]


def sample(seconds: float, *, moved: float = 0, flops: float = 0, **at: float | str) -> Sample:
    """Five repeats that agree."""
    return Sample(at=at, seconds=(seconds,) * 5, moved_bytes=moved, flops=flops, checked="equal")


def copies(*, rate: float = LINK) -> ProbeRecord:
    """Single copies and queues at `rate`."""
    made = []
    for count in (1, 4, 16, 64):
        for size in (2**16, 2**20, 2**24, 2**28):
            seconds = QUEUE_START_S + COPY_LATENCY_S * count + count * size / rate
            made.append(sample(seconds, moved=count * size, copies=count, copy_bytes=size))
    return ProbeRecord(samples=tuple(made), took_s=1.0)


def records() -> dict[str, ProbeRecord]:
    """Every probe that a profile needs, and the kernels of a decode step and a prefill chunk."""
    link = [
        sample(2**24 / (LINK * share), moved=2**24, run_bytes=run, region_bytes=2**30, pages="huge")
        for run, share in ((512, 0.4), (4096, 1.0))
    ]
    host = [sample(2**30 / 50e9, moved=2**30, run_bytes=2**30), sample(2**20 / 5e9, moved=2**20, run_bytes=64)]
    disk = [sample(200 * 1e-4, moved=200 * 4096, run_bytes=4096, threads=1, reads=200)]
    disk.append(sample(2**20 / 0.5e9, moved=2**20, run_bytes=4096, threads=16, reads=256))
    made = {
        "vram_read": [sample(2**30 / VRAM, moved=2**30, bytes=2**30)],
        "vram_copy": [sample(2**31 / VRAM, moved=2**31, bytes=2**30)],
        "host_to_device_gather": link,
        "host_read": [*host, sample(1e-7, moved=64, run_bytes=64, alone=1)],
        "disk_read": [sample(2**28 / DISK, moved=2**28, run_bytes=2**28)],
        "disk_random_read": disk,
        "product.fp16": [
            *(product(tokens, 4096) for tokens in (16, 512, 8192)),
            *(product(1, rows) for rows in (2048, 8192, 32768)),
        ],
        **kernels(),
    }
    found = {name: ProbeRecord(samples=tuple(samples), took_s=1.0) for name, samples in made.items()}
    return found | {"host_to_device_copy": copies(), "device_to_host_copy": copies(rate=0.9 * LINK)}


def product(tokens: int, rows: int) -> Sample:
    """At the roof beyond 2 us."""
    moved, flops = rows * 4096 * 2, 2.0 * tokens * rows * 4096
    seconds = 2e-6 + max(moved / VRAM, flops / TENSOR)
    return sample(seconds, moved=moved, flops=flops, dtype="fp16", tokens=tokens, rows=rows, columns=4096)


def kernels() -> dict[str, list[Sample]]:
    """Selection and gathers with known latencies and efficiencies, per layer."""
    plane = 2 * 2 * 256 * 2
    select = []
    for ctx, share in EFFICIENCY.items():
        scan, scores = ctx // 4 * 256, 2 * 4 * (ctx // 4)
        seconds = SELECT_LATENCY_S + scan / VRAM / share + scores / VRAM
        select.append(sample(seconds, moved=scan, tier="vram", ctx_tokens=ctx, layers=12))
    points = [*((ctx, 2048) for ctx in CONTEXTS), *((32768, budget) for budget in (128, 512, 8192))]
    made = {"decode_select": select}
    for tier, rate in (("vram", VRAM), ("host", LINK)):
        made[f"decode_gather.{tier}"] = [
            gathered(budget * plane, rate * EFFICIENCY[ctx], ctx, budget, tier) for ctx, budget in points
        ]
    return made


def gathered(moved: float, rate: float, ctx: int, budget: int, tier: str) -> Sample:
    """One gather."""
    time = GATHER_LATENCY_S + moved / rate
    return sample(time, moved=moved, tier=tier, ctx_tokens=ctx, budget=budget, layers=12)


def fake_probes() -> tuple[Probe, ...]:
    """A probe per record, which gives it at once."""
    return tuple(
        Probe(name=name, run=lambda _context, record=record: list(record.samples), quick_s=1, full_s=1)
        for name, record in records().items()
    )


def fake_probe(name: str, samples: list[Sample]) -> Probe:
    """A probe that always gives `samples`."""

    def run(_context: Context) -> list[Sample]:
        return samples

    return Probe(name=name, run=run)
