"""What is said where a device is missing, and the clock: others' time is not counted, what work waits for is."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from realkernels import device as module
from realkernels.device import CpuDevice, host_seconds, open_device, queued_seconds, undisturbed_seconds

counted = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count it")


def refusal(name: str = "cuda") -> str:
    """The one line with which a device is refused."""
    with pytest.raises(RuntimeError) as caught:
        open_device(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA")
def test_without_cuda_it_is_said_in_one_line() -> None:
    assert "was built without CUDA" in refusal()
    assert "no kernels for device meta" in refusal("meta")


def test_a_driver_that_is_too_old_is_said_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver is too old (found version 11040). Please update\nyour driver")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    words = "The NVIDIA driver is too old (found version 11040)"
    assert refusal() == f"no usable GPU: {words}; use device cpu to go without"


def test_gpus_that_are_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GTX 1080")
    assert refusal("cuda:2") == "there is no GPU 2: this machine has 2, numbered from 0"
    assert "GTX 1080 has compute capability 6.1; the kernels need 7.0" in refusal("cuda:1")


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _name: None)
    assert "triton is not installed" in refusal()


def test_seconds_keeps_each_repeat_and_prepares_every_one() -> None:
    order: list[str] = []
    made = CpuDevice(threads=1)
    work = made.capture(lambda: order.append("work"))
    samples = made.seconds(work, repeats=4, warm_up=2, before=lambda: order.append("before"))
    assert len(samples) == 4
    assert all(sample >= 0 for sample in samples)
    assert order == ["before", "work"] * 6


@pytest.mark.parametrize(
    ("computed_s", "before", "after", "left_s"),
    [
        (1.0, {"1": 5.0}, {"1": 7.0}, 1.0),
        (0.5, {"1": 0.0, "2": 1.0}, {"1": 1.0, "2": 2.5}, 1.5),  # side by side: the longest wait counts once
        (0.5, {}, {"9": 1.0}, 2.0),  # of a thread that began during the work
        (2.0, {"1": 0.0}, {"1": 2.5}, 2.0),  # what was computed is never taken off
        (3.0 + 1e-6, {}, {}, 3.0),
        (0.1, {"1": 4.0}, {"1": 4.0}, 3.0),
    ],
)
def test_the_wait_for_a_core_is_taken_off(
    computed_s: float, before: dict[str, float], after: dict[str, float], left_s: float
) -> None:
    assert undisturbed_seconds(3.0, computed_s, before, after) == left_s


def test_waiting_for_something_else_than_a_core_is_part_of_the_work() -> None:
    """But for what another thread of this process waited for a core meanwhile, which is taken off."""
    assert 0.03 <= host_seconds(lambda: time.sleep(0.05)) < 0.5


@counted
def test_every_thread_of_this_process_is_counted() -> None:
    before = queued_seconds()
    assert before
    assert all(seconds >= before.get(thread, 0.0) for thread, seconds in queued_seconds().items())


@counted
def test_work_takes_no_longer_beside_processes_that_take_its_core() -> None:
    def work() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        time.sleep(0.3)
        samples = [host_seconds(work) for _ in range(6)]
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert all(0.05 <= sample < 0.06 for sample in samples), samples


FAULTS = """
import resource, torch
from realkernels.device import keep_freed_memory
print(int(keep_freed_memory()))

def temporaries():
    for mib in (1, 4, 9, 17, 30):
        torch.ones(mib * 2**18)

for _ in range(3):  # until the heap has grown to what they need
    temporaries()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    temporaries()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_temporaries_are_not_paid_for_again() -> None:
    ended = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    kept, faults = map(int, ended.stdout.split())
    if not kept:
        pytest.skip("another C library")
    assert faults < 1_000  # 5 times 61 MiB are 78,080 pages
