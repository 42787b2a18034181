"""A link is fitted to what collectives took and predicts sizes between; files that are no such samples are refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from calibrate import links
from hwprofiles import load_profile
from twin.errors import BadFile

pytest.importorskip("torch")

from calibrate.machine.collectives import GPU_GRID, by_role

PEAK = 3.6e11


def by_protocol(ring: links.Ring, message_bytes: float) -> float:
    """As NCCL reckons: the quickest of its three protocols, each with a latency and a share of the link."""
    steps, moved = ring.rounds * (ring.ranks - 1), ring.share * message_bytes
    protocols = ((6.6e-6, 0.6e-6, 0.25), (14e-6, 1.9e-6, 0.92), (8.4e-6, 3.4e-6, 1.0))
    return min(base + steps * step + moved / (PEAK * share) for base, step, share in protocols)


def straight(ring: links.Ring, message_bytes: float) -> float:
    return 1e-5 * ring.latencies("nvlink") + ring.share * message_bytes / PEAK


def made_up(took: Callable[[links.Ring, float], float], *, ranks: int = 2) -> dict[str, Any]:
    """What the probe writes, of links that take what they are told to."""

    def samples() -> Iterator[dict[str, Any]]:
        for operation, sizes in (("all_reduce", GPU_GRID.reduced), ("all_gather", GPU_GRID.gathered)):
            ring = links.Ring(ranks, links.ROUNDS[operation])
            for role, size in by_role(sizes):
                second = took(ring, size)
                yield {"operation": operation, "implementation": "nccl_graph", "role": role, "at": {"bytes": size},
                       "median_s": second, "seconds": [second * 0.99, second, second * 1.01], "calls": 20}  # fmt: skip

    return {
        "schema": links.SCHEMA,
        "whole": True,
        "date": "2026-12-01",
        "ranks": ranks,
        "backend": "nccl",
        "nccl": "2.28.7",
        "samples": list(samples()),
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_link_with_one_latency_and_one_rate_is_given_back(ranks: int) -> None:
    found = made_up(straight, ranks=ranks)
    machine = links.linked(load_profile("h200"), found, name="NVLink 4")
    assert machine.gpu_count == ranks
    assert machine.gpu.peer is not None
    assert machine.gpu.peer.rate.value == pytest.approx(PEAK)
    assert machine.gpu.peer.datasheet.value == 4.5e11
    assert all(abs(each.error) < 2e-3 for each in links.held_out(found, machine))


def test_sizes_between_those_of_three_protocols_are_predicted() -> None:
    found = made_up(by_protocol)
    judged = list(links.held_out(found, links.linked(load_profile("h200"), found, name="NVLink 4")))
    assert len(judged) == 10
    assert max(abs(each.error) for each in judged) < 0.04
    assert "all_reduce: median" in links.report(judged)


def test_a_shared_layer_is_lowered_as_predictions_are() -> None:
    """Held-out layers of one and of two ranks; what they took here is made up, twice what is predicted."""
    found = made_up(straight)
    at = {"batch": 1, "q_tokens": 1, "past_tokens": 4095}
    for tp in (1, 2):
        found["samples"].append({"operation": "layer", "implementation": f"tp{tp}", "role": "held_out", "at": at,
                                 "median_s": 1e-4, "seconds": [1e-4], "calls": 4})  # fmt: skip
    machine = links.linked(load_profile("h200"), found, name="NVLink 4")
    alone, shared = list(links.held_out(found, machine))[-2:]
    assert [alone.id, shared.id] == [f"layer tp {tp}: batch 1 q_tokens 1 past_tokens 4095" for tp in (1, 2)]
    latency_s = machine.kernels["all_reduce/nccl/nvlink"].latency
    assert latency_s is not None
    assert alone.predicted_s / 2 + 2 * latency_s.value < shared.predicted_s < alone.predicted_s + 4 * latency_s.value


def test_the_command_writes_rates_as_a_profile_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "links.json").write_text(json.dumps(made_up(straight)))
    links.main([str(tmp_path / "links.json"), "-o", str(tmp_path / "rates.json")])
    assert "all_gather: median" in capsys.readouterr().out
    written = json.loads((tmp_path / "rates.json").read_text())
    assert set(written["kernels"]) == {"all_reduce/nccl/nvlink", "all_gather/nccl/nvlink"}
    own = {"schema": "twin.hardware/1", "extends": "h200", "name": "linked", "kernels": written["kernels"]}
    own |= {"gpu": {"peer": written["peer"], "peer_link": written["peer_link"]}}
    for kernel in own["kernels"].values():
        kernel.pop("machine")
    (tmp_path / "own.json").write_text(json.dumps(own))
    profile = load_profile(str(tmp_path / "own.json"))
    assert profile.gpu.peer_kind == "nvlink"
    assert "all_reduce/nccl/nvlink" in profile.kernels


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "Expecting"), ("[]", "no samples of collectives"), ('{"schema": "twin.hardware/1"}', "no samples"),
     (json.dumps({"schema": links.SCHEMA, "whole": False}), "interrupted")],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "links.json").write_text(text)
    with pytest.raises(BadFile, match=says):
        links.read(tmp_path / "links.json")
    with pytest.raises(BadFile):
        links.read(tmp_path / "none.json")
