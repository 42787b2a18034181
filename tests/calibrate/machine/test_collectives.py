"""Two processes of one machine sum, gather and share layers; what they keep says on what it was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from calibrate.machine import collectives  # noqa: E402 - needs torch
from realkernels.shape import DenseShape  # noqa: E402
from realkernels.timed.library import random_weights  # noqa: E402


def test_two_processes_check_and_time_all_that_needs_no_device(tmp_path: Path) -> None:
    steps = {"fit": ((1, 1, 15),), "held_out": ((1, 4, 0),)}
    grid = replace(collectives.CPU_GRID, steps=steps, repeats=2, layers=1)
    output = tmp_path / "links.json"
    collectives.measure(output, grid=grid)
    found = json.loads(output.read_text())
    assert found["whole"]
    assert (found["ranks"], found["backend"], found["settings"]["NCCL_NVLS_ENABLE"]) == (2, "gloo", "0")
    assert set(found["skipped"]) == {"all_reduce_graph", "peer_copies", "one_sided"}
    kinds = {(sample["operation"], sample["implementation"]) for sample in found["samples"]}
    assert kinds == {("all_reduce", "gloo"), ("all_gather", "gloo"), ("layer", "tp1"), ("layer", "tp2")}
    assert all(len(sample["seconds"]) == 2 and min(sample["seconds"]) > 0 for sample in found["samples"])
    assert all(sample["error"] < 1e-5 for sample in found["samples"])


@pytest.mark.parametrize("grid", [collectives.GPU_GRID, collectives.CPU_GRID], ids=["gpu", "cpu"])
def test_what_is_held_out_was_never_fitted(grid: collectives.Grid) -> None:
    for points in (grid.reduced, grid.gathered, grid.copied, grid.steps):
        assert not set(points["fit"]) & set(points["held_out"])


def test_shares_of_a_layer_add_up_to_it() -> None:
    shape = DenseShape(hidden=16, query_heads=4, kv_heads=2, head_dim=4, intermediate=8)
    whole = random_weights(shape, torch.float64, torch.device("cpu"))
    inputs = torch.randn(3, shape.hidden, dtype=torch.float64)
    shares = [collectives.shared_weights(whole, shape, rank, 2) for rank in range(2)]
    gates = [torch.nn.functional.silu(part.chunk(2, dim=1)[0]) * part.chunk(2, dim=1)[1] for part in
             (inputs @ share.gate_up.T for share in (*shares, whole))]  # fmt: skip
    summed = sum(gate @ share.down.T for gate, share in zip(gates[:2], shares, strict=True))
    assert torch.allclose(torch.as_tensor(summed), gates[2] @ whole.down.T)
    made = [(inputs @ share.qkv.T).split([8, 4, 4], dim=1) for share in shares]
    truth = (inputs @ whole.qkv.T).split([16, 8, 8], dim=1)
    for index in range(3):
        assert torch.allclose(torch.cat([part[index] for part in made], dim=1), truth[index])


def test_a_shape_that_ranks_cannot_share_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks do not share"):
        DenseShape().shared_by(3)
