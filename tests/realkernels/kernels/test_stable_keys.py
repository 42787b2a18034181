"""What a kernel's compiled code is kept under does not depend on which kernels a process met before it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CODE = Path(__file__).with_name("key_code.py")
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def processes() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    begun = [
        subprocess.Popen([sys.executable, str(CODE), str(seed)], env=environment, stdout=subprocess.PIPE)
        for seed in SEEDS
    ]
    said = [process.communicate(timeout=300)[0] for process in begun]
    assert [process.returncode for process in begun] == [0] * len(SEEDS)
    return [json.loads(text) for text in said]


def test_processes_that_meet_kernels_in_different_orders_agree_on_their_keys(processes: list[dict[str, Any]]) -> None:
    first, *others = (process["keys"] for process in processes)
    assert len(first) > 100
    assert "realkernels.kernels.decode_words._attend_words" in first
    for other in others:
        assert {name for name in first if other[name] != first[name]} == set()


def test_modules_with_stable_keys_are_hashed_at_import_and_others_are_not(processes: list[dict[str, Any]]) -> None:
    hashed = set(processes[0]["at_import"])
    assert "realkernels.kernels.word_steps.wide_step" in hashed
    assert "realkernels.codecs.kvarn_append._quantise_tiles" in hashed
    assert "realkernels.kernels.decode_words._attend_words" not in hashed
