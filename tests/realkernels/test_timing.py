"""The host's clock: what other processes take from a thread is not counted, what the work itself waits for is."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from realkernels.timing import clock_seconds, queued_seconds, undisturbed_seconds

counted = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count it")


def test_the_wait_for_a_core_is_taken_off() -> None:
    assert undisturbed_seconds(3.0, 1.0, {"1": 5.0}, {"1": 7.0}) == 1.0


def test_of_threads_that_wait_side_by_side_the_longest_wait_counts_once() -> None:
    assert undisturbed_seconds(3.0, 0.5, {"1": 0.0, "2": 1.0}, {"1": 1.0, "2": 2.5}) == 1.5


def test_a_thread_that_began_during_the_work_waited_since_then() -> None:
    assert undisturbed_seconds(3.0, 0.5, {}, {"9": 1.0}) == 2.0


def test_what_was_computed_is_never_taken_off() -> None:
    assert undisturbed_seconds(3.0, 2.0, {"1": 0.0}, {"1": 2.5}) == 2.0


@pytest.mark.parametrize("queued", [{}, {"1": 4.0}])
def test_a_run_that_nobody_disturbed_is_the_walls_clock(queued: dict[str, float]) -> None:
    assert undisturbed_seconds(3.0, 0.1, queued, queued) == 3.0
    assert undisturbed_seconds(1.0, 1.0 + 1e-6, queued, queued) == 1.0


def test_waiting_for_something_else_than_a_core_is_part_of_the_work() -> None:
    (slept,) = clock_seconds(lambda: time.sleep(0.05), repeats=1, warm_up=0)
    assert 0.05 <= slept < 0.5


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
        wall = time.perf_counter()
        samples = clock_seconds(work, repeats=6, warm_up=0)
        wall = (time.perf_counter() - wall) / 6
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert all(0.05 <= sample < 0.06 for sample in samples), (samples, wall)
