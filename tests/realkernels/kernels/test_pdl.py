"""Which launches of a gather use PDL, that each of them waits once, and where compiled code waits."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl

from realkernels.caches.interleaved import BLOCK_CODECS
from realkernels.kernels import gather
from realkernels.kernels.gather import InterleavedGather
from tests.realkernels.kernels.test_gather import PLAN, World
from tests.realkernels.worlds import SMALL, TOLERANCE

CPU = torch.device("cpu")
KERNELS = {"rotate": "_rotate", "attend": "_attend_interleaved", "combine": "_combine_splits"}
ROTATED = {"int4_per_token_head", "exl3_k4v4"}


def gathered(name: str, *, begins: bool) -> World:
    """A call whose later launches use PDL, or none."""
    world = World(name, SMALL, 131)
    made = InterleavedGather(world.fmt, SMALL, device=CPU, plan=PLAN)
    made.pdl = begins
    made.run(world.query, world.planes, world.selected, world.end, world.output)
    return world


def launches(monkeypatch: pytest.MonkeyPatch, name: str, *, begins: bool) -> list[tuple[str, dict[str, Any]]]:
    """Kernels of a call in order, with what each launch was given by name."""
    seen: list[tuple[str, dict[str, Any]]] = []

    class Recorder:
        def __init__(self, kernel: str) -> None:
            self.kernel = kernel

        def __getitem__(self, _grid: object) -> Callable[..., None]:
            return lambda *_given, **named: seen.append((self.kernel, named))

    for kernel, attribute in KERNELS.items():
        monkeypatch.setattr(gather, attribute, Recorder(kernel))
    gathered(name, begins=begins)
    return seen


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_all_but_the_first_use_it_and_all_but_the_last_let_one_begin(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen = launches(monkeypatch, name, begins=True)
    order = ["rotate", "attend", "combine", "rotate"] if name in ROTATED else ["attend", "combine"]
    assert [kernel for kernel, _ in seen] == order
    later = [number > 0 for number in range(len(seen))]
    assert [named["PDL"] for _, named in seen] == later
    assert [named.get("launch_pdl", False) for _, named in seen] == later
    assert [named["FOLLOWED"] for _, named in seen] == [*later[1:], False]


@pytest.mark.parametrize("name", ["int4_per_token_head", "q8_0"])
def test_nothing_uses_it_where_it_cannot(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert not gather.has_pdl(CPU)
    assert not gather.has_pdl(torch.device("cuda"))  # interpreted
    for _, named in launches(monkeypatch, name, begins=False):
        assert not named["PDL"]
        assert not named["FOLLOWED"]
        assert "launch_pdl" not in named


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_every_thread_block_with_it_waits_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = {"waits": 0, "lets": 0}

    def count(what: str) -> Callable[[], None]:
        return lambda: calls.__setitem__(what, calls[what] + 1)

    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", count("waits"), raising=False)
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", count("lets"), raising=False)
    assert gathered(name, begins=True).error() < TOLERANCE[torch.float16]
    attend = SMALL.kv_heads * PLAN.splits(SMALL)
    combine = SMALL.query_heads * (SMALL.head_dim // min(PLAN.combined_columns, SMALL.head_dim))
    rotations = SMALL.head_dim // gather.ROTATED_COLUMNS
    if name in ROTATED:
        assert calls == {"waits": attend + combine + rotations, "lets": rotations + attend + combine}
    else:
        assert calls == {"waits": combine, "lets": attend}


@pytest.mark.parametrize("name", ["int4_per_token_head", "exl3_k4v4"])
def test_compiled_code_reads_codes_before_it_waits_and_the_query_after(name: str) -> None:
    """Compiled for compute capability 9.0: l a load, s a store, W the wait, N what lets the next begin."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.realkernels.kernels.pdl_code", name]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    rotated, attend, combine, back = json.loads(found.stdout.splitlines()[-1])
    assert rotated.startswith("Nl")
    assert "W" not in rotated
    before, after = attend.split("W")
    assert before[0] == "N"
    assert before.count("l") >= 4  # the selection, codes of K and V, scales
    assert "s" not in before
    assert after.startswith("l")
    assert after.endswith("s")
    assert combine.startswith("NWl")
    before, after = back.split("W")
    assert set(before) == {"l"}
    assert after.startswith("l")
    assert after.endswith("s")
