"""Appending as it is timed: what is written at once is what torch writes in parts; wrong bytes are noticed."""

import pytest
import torch

from realkernels.codecs import codec_names
from realkernels.shape import AttentionShape
from realkernels.timed.append import Append

CPU = torch.device("cpu")
SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=64)
WIDE = AttentionShape(query_heads=4, kv_heads=2, head_dim=128)
NAMES = [name for name in codec_names() if not name.startswith("exl3") or name in {"exl3_k4v4", "exl3_k3v8"}]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_what_is_appended_at_once_is_what_is_appended_in_parts(name: str, tokens: int) -> None:
    shape = WIDE if "turboquant" in name else SHAPE
    timed = Append(name, shape=shape, tokens=tokens, layers=2, device=CPU)
    assert timed.verify() < 1
    assert timed.faults() == ""
    assert timed.finite()


@pytest.mark.parametrize("name", ["int8_per_token_head", "bf16", "kvarn_k4v2_g128"])
def test_an_append_that_writes_nothing_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Append(name, shape=SHAPE, tokens=2, layers=2, device=CPU)
    monkeypatch.setattr(timed, "_append", lambda *_given, **_named: None)
    assert timed.verify() == float("inf")
    assert timed.faults()


@pytest.mark.parametrize("broken", ["", "side_keys", "tiles"])
def test_quantised_tiles_are_checked_and_the_open_one(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile that earlier tokens began, completed, and six tokens of the next; then a byte of either is wrong."""
    timed = Append("kvarn_k4v2_g64", shape=SHAPE, tokens=10, past_tokens=60, layers=1, fused=True, device=CPU)
    run = timed.run

    def wrong() -> None:
        run()
        planes = timed.planes[0]
        if broken == "tiles":
            planes.tensors["tiles"][0, 5] ^= 64
        elif broken:
            planes.sidecar[broken][planes.sidecar["side_of_tile"][1], 2] += 1.0

    monkeypatch.setattr(timed, "run", wrong)
    assert (timed.verify() == float("inf")) == bool(broken)


def test_bytes_of_an_append_are_those_in_16_bits_and_as_they_are_kept() -> None:
    timed = Append("q8_0", shape=SHAPE, tokens=10, layers=3, device=CPU)
    assert timed.calls == 3
    assert timed.moved_bytes == 10 * (2 * 2 * 64 * 2 + 2 * 2 * 2 * 34)
