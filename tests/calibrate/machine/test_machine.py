"""A machine is described alike twice and has peaks; its probes run and check themselves, here and on a made-up GPU."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.build import HEADROOM, peak
from calibrate.machine import description
from calibrate.machine.description import commit, describe, host_memory, query_smi
from calibrate.probes import Context, Sample, WrongData
from tests.calibrate import probe_worlds as worlds

SMI = ["9.9", "1", "2", "30", "700", "1500", "1980", "2600", "4", "5", "8", "16"]


def test_a_machine_is_itself_when_looked_at_twice_and_a_control_group_limits_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total, free = host_memory()
    assert 0 < free <= total
    machine = describe("cpu")
    assert machine.identity() == describe("cpu").identity()
    assert (machine.compute_capability, machine.device_bytes) == ("0.0", machine.host_bytes)
    told = {"memory.max": "1000000", "memory.current": "400000", "memory.stat": "file 7\ninactive_file 100000"}
    read = description.text_of
    monkeypatch.setattr(description, "text_of", lambda path: told.get(Path(path).name, read(path)))
    assert host_memory() == (1_000_000, 700_000)


@pytest.mark.parametrize(
    ("printed", "known"), [(", ".join(SMI) + "\n", 12), ("No devices were found\n", 0), ("", 0), (OSError(), 0)]
)
def test_a_driver_s_program_is_believed_only_where_it_answers(
    monkeypatch: pytest.MonkeyPatch, printed: str | Exception, known: int
) -> None:
    def run(*_: Any, **__: Any) -> SimpleNamespace:
        if isinstance(printed, Exception):
            raise printed
        return SimpleNamespace(stdout=printed)

    monkeypatch.setattr("shutil.which", lambda _name: "/bin/some")
    monkeypatch.setattr(subprocess, "run", run)
    found = query_smi("cuda:0", "")
    assert len(found) == known
    assert not known or (found["driver_version"], found["pcie.link.width.max"]) == ("9.9", "16")
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert (query_smi("cuda:0", ""), commit()) == ({}, "")


@pytest.mark.parametrize(
    ("kind", "measured", "machine", "value", "source"),
    [
        ("vram", 4e12, {"name": "NVIDIA H200"}, 4.8e12, "datasheet"),
        ("vram", 5e12, {"name": "NVIDIA H200"}, 5e12 * HEADROOM, "measured"),
        ("vram", 1e12, {}, 1e12 * HEADROOM, "measured"),
        ("link", 1e9, {}, 16 * 3.938e9, "datasheet"),
        ("link", 1e9, {"smi": {}}, 1e9 * HEADROOM, "measured"),
        ("instructions", 1e9, {"smi": {"clocks.max.sm": "2000"}}, 100 * 64 * 2e9, "datasheet"),
        ("dram", 1e9, {"name": "NVIDIA H200"}, 1e9 * HEADROOM, "measured"),
    ],
)
def test_a_peak_is_that_of_a_data_sheet_and_never_below_what_was_measured(
    kind: str, measured: float, machine: dict[str, Any], value: float, source: str
) -> None:
    found = peak(kind, measured, "B/s", worlds.machine(**machine), date="2026-12-01")
    assert (found["value"], found["source"]) == (pytest.approx(value), source)
    assert found["note"]
    assert kind != "vram" or machine or "no data sheet" in found["note"]


# Probes, where torch and triton are.


@pytest.mark.parametrize(
    "name", ["vram_read", "vram_copy", "host_to_device_copy", "host_to_device_gather", "disk_read", "disk_random_read"]
)
def test_a_probe_runs_on_the_cpu_and_checks_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("torch")
    from tests.calibrate.cpu_probes import context, probe_of

    monkeypatch.setattr("calibrate.machine.device._vram_sizes", lambda _context: [2**22])
    samples = probe_of(name).run(context(tmp_path, estimate_s=0.0))  # the first point only
    assert samples
    assert all(sample.median_s > 0 and sample.moved_bytes and sample.checked for sample in samples)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[Sample]]:
    """Runs a probe as on a GPU whose memory, small, is the host's and whose kernels are interpreted."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from calibrate.machine import device, kernels, link
    from realkernels.device import CpuDevice
    from tests.calibrate.cpu_probes import probe_of

    if not hasattr(kernels._sum, "rewrite"):
        pytest.skip("the kernels were imported before TRITON_INTERPRET was set")

    @contextmanager
    def slab(nbytes: int, **_: Any) -> Iterator[SimpleNamespace]:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        yield SimpleNamespace(host=memory, device=memory)

    for name, fake in {
        "get_device_properties": lambda _device: SimpleNamespace(multi_processor_count=2),
        "synchronize": lambda _device: None,
        "Stream": lambda _device: SimpleNamespace(wait_stream=lambda _other: None),
        "current_stream": lambda _device: SimpleNamespace(wait_stream=lambda _other: None),
        "stream": lambda _stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("realkernels.caches.host_memory.registered", slab)
    for module, name, value in (
        (link, "SINGLE", (2**16,)), (link, "QUEUED", ((4, 2**14), (64, 2**12))), (link, "LOADED_S", 0.001),
        (link, "MIB", 2**12), (device, "_vram_sizes", lambda _context: [2**18]),
        (link, "_buffer_bytes", lambda _context: 2**17), (link, "_regions", lambda _context: [2**18]),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    backend = CpuDevice(threads=1)
    monkeypatch.setattr(backend, "capture", lambda work: work)
    context = Context(machine=worlds.machine(), backend=backend, folder=tmp_path, quick=True, estimate_s=0.0)
    return lambda name: probe_of(name).run(context)


POINTS = {
    "vram_read": [{"bytes": 2**18}],
    "vram_copy": [{"bytes": 2**18}],
    "host_to_device_copy": [
        {"copies": 1, "copy_bytes": 2**16}, {"copies": 4, "copy_bytes": 2**14}, {"state": "loaded"},
    ],
    "device_to_host_copy": [{"copies": 1, "copy_bytes": 2**16}, {"copies": 4, "copy_bytes": 2**14}],
    "host_to_device_copy_pageable": [{"copies": 1, "copy_bytes": 2**12}],
    "device_to_host_copy_duplex": [{"copy_bytes": 2**16}],
    "host_to_device_read": [{"bytes": 2**20}],
    "host_to_device_gather": [{"run_bytes": 512, "region_bytes": 2**18, "pages": pages} for pages in ("huge", "4KiB")],
    "launch": [{"nodes": 200}],
    "graph_node": [{"nodes": 200}],
}  # fmt: skip
"""Where a probe that is late at once takes its samples."""


@pytest.mark.parametrize("name", POINTS)
def test_what_a_gpu_alone_runs_copies_and_adds_up_right(gpu: Callable[[str], list[Sample]], name: str) -> None:
    samples = gpu(name)
    assert [dict(sample.at) for sample in samples] == POINTS[name]
    assert all(sample.checked for sample in samples if "state" not in sample.at)


@pytest.mark.parametrize("name", ["vram_read", "host_to_device_gather", "host_to_device_copy"])
def test_a_wrong_result_is_noticed(
    gpu: Callable[[str], list[Sample]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from calibrate.machine import kernels, link

    monkeypatch.setattr(link, "_same", lambda *_: False)
    for kernel in (kernels.Sum, kernels.RunSums):
        monkeypatch.setattr(kernel, "run", lambda own: own.partial.fill_(1))
    with pytest.raises(WrongData, match=name):
        gpu(name)


# Operations a second.


def test_a_chain_is_what_the_instructions_say_every_operation_is_counted_and_wrong_chains_are_noticed() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from calibrate.machine.kernels import _ASSEMBLY, ROUNDS, Chains, chained

    assert chained(0b1011, (0b0110, 0b1000), 1) == ((0b1011 & 0b0110) ^ 0b1000) << 7
    assert chained(0xFFFFFFFF, (0xFFFFFFFF, 0), 5) == 0xFFFFFFFF
    assert chained(1, (0xFFFFFFFF, 0), 32) == 1
    timed = Chains(chains=4, device=torch.device("cpu"), steps=3, programs=2)
    assert timed.operations == 2 * 4 * 256 * 3 * 16
    assert (_ASSEMBLY.count("lop3"), _ASSEMBLY.count("shf")) == (8, 8)
    first, second = (int(mask) & 0xFFFFFFFF for mask in timed.masks.tolist())
    right = [chained(start & 0xFFFFFFFF, (first, second), 3 * ROUNDS) for start in timed.data.tolist()]
    timed.out.copy_(torch.tensor(right).int())
    assert timed.right()
    timed.out[0] += 1
    assert not timed.right()
