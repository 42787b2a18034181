"""Sampling from logits: draws follow the softmax at its temperature, row by row; a wrong draw is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from realkernels.library_sampling import TEMPERATURE, LibrarySampling

from realkernels import library_sampling

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5])
DRAWS = 40_000


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


def sampling(logits: torch.Tensor) -> LibrarySampling:
    """Sampling from these rows."""
    made = LibrarySampling(rows=logits.shape[0], vocab=logits.shape[1], device=CPU)
    made.logits.copy_(logits)
    return made


def frequencies(logits: torch.Tensor) -> torch.Tensor:
    """How often each token is drawn from one row of logits."""
    made = sampling(logits.repeat(DRAWS, 1))
    made.run()
    return torch.bincount(made.tokens, minlength=logits.numel()).double() / DRAWS


def test_draws_follow_the_softmax_at_its_temperature() -> None:
    found, wanted = frequencies(LOGITS), torch.softmax(LOGITS.double() / TEMPERATURE, dim=0)
    deviations = (found - wanted) / (wanted * (1 - wanted) / DRAWS).sqrt()
    assert deviations.abs().max() < 4
    assert (frequencies(LOGITS * TEMPERATURE) - wanted).abs().max() > 0.02  # what no temperature would give


def test_no_token_is_drawn_that_has_no_share() -> None:
    logits = LOGITS.clone()
    logits[3] = -torch.inf
    found = frequencies(logits)
    assert found[3] == 0
    assert found.count_nonzero() == LOGITS.numel() - 1


def test_equal_logits_are_drawn_equally_often() -> None:
    found = frequencies(torch.zeros(8))
    assert (found - 1 / 8).abs().max() < 4 * (1 / 8 * 7 / 8 / DRAWS) ** 0.5


def test_every_row_is_drawn_from_its_own_logits() -> None:
    wanted = torch.randperm(50)
    made = sampling(torch.nn.functional.one_hot(wanted, 50) * 100.0)
    made.run()
    assert torch.equal(made.tokens, wanted)


def test_two_draws_of_the_same_logits_differ() -> None:
    made = sampling(torch.zeros(64, 1000))
    made.run()
    first = made.tokens.clone()
    made.run()
    assert (made.tokens != first).sum() > 48


@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (1, 128_256), (7, 1001), (64, 33)])
def test_a_draw_agrees_with_float64(rows: int, vocab: int) -> None:
    made = LibrarySampling(rows=rows, vocab=vocab, device=CPU)
    assert made.verify() < 1e-5
    assert made.finite()
    assert 0 <= int(made.tokens.min()) <= int(made.tokens.max()) < vocab


def test_what_is_not_drawn_is_noticed() -> None:
    made = LibrarySampling(rows=3, vocab=10, device=CPU)
    made.poison()
    assert not made.finite()
    made.run()
    assert made.finite()
    made.tokens[1] = -1
    assert not made.finite()


def never(_shares: torch.Tensor, **_how: Any) -> None:
    return


def always_the_first(_shares: torch.Tensor, *, out: torch.Tensor, **_how: Any) -> None:
    out.zero_()


def the_second_best(shares: torch.Tensor, *, out: torch.Tensor, **_how: Any) -> None:
    out.copy_(shares.topk(2, dim=1).indices[:, 1])


def one_row_wrong(shares: torch.Tensor, *, out: torch.Tensor, **_how: Any) -> None:
    out.copy_(shares.max(dim=1).indices)
    out[-1] = shares[-1].min(dim=0).indices


def of_another_row(shares: torch.Tensor, *, out: torch.Tensor, **_how: Any) -> None:
    out.copy_(shares.max(dim=1).indices.roll(1))


@pytest.mark.parametrize("draw", [always_the_first, the_second_best, one_row_wrong, of_another_row])
def test_a_wrong_draw_is_noticed(monkeypatch: pytest.MonkeyPatch, draw: Callable[..., None]) -> None:
    made = LibrarySampling(rows=16, vocab=500, device=CPU)
    monkeypatch.setattr(library_sampling.torch, "argmax", draw)
    assert made.verify() > 0.01


def test_no_draw_at_all_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LibrarySampling(rows=16, vocab=500, device=CPU)
    made.run()  # so that tokens lie there
    monkeypatch.setattr(library_sampling.torch, "argmax", never)
    assert made.verify() == float("inf")


def test_a_draw_without_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LibrarySampling(rows=16, vocab=500, device=CPU)
    monkeypatch.setattr(torch.Tensor, "div_", lambda shares, _noise: shares)
    assert made.verify() > 0.01


def test_a_draw_from_stale_logits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LibrarySampling(rows=16, vocab=500, device=CPU)
    stale, softmax = made.logits.clone(), torch.softmax
    run = made.run

    def from_stale() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "softmax", lambda _logits, dim: softmax(stale / TEMPERATURE, dim=dim))
            run()

    monkeypatch.setattr(made, "run", from_stale)
    assert made.verify() > 0.01
