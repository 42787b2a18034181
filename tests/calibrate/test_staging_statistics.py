"""The engine's staging statistic: 103-fold as printed, 127-fold for the prompt alone."""

from typing import Any

import pytest

from calibrate.staging_statistics import StagingStatistics, staging_statistics
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.errors import BadValue


def statistics(prompt_tokens: int = 60_000, **question: Any) -> StagingStatistics:
    case = resolve(Question(ctx_tokens=prompt_tokens, **question))
    return staging_statistics(case, prompt_tokens=prompt_tokens, cache_tokens=262_144)


def test_the_published_prompt_gives_the_published_ratio() -> None:
    found = statistics()
    assert (found.rows, found.pages) == (57_951, 3_707)
    assert (found.probe_rows, found.probe_pages) == (2_048, 1_024)
    assert found.ratio == pytest.approx(103.04, abs=0.005)
    assert found.ratio_without_probe == pytest.approx(127.02, abs=0.005)


def test_a_chunk_of_4096_gives_the_ratios_that_were_not_published() -> None:
    found = statistics(chunk_tokens=4096)
    assert found.ratio == pytest.approx(177, abs=0.5)
    assert found.ratio_without_probe == pytest.approx(254.6, abs=0.1)


def test_bytes_staged_do_not_depend_on_the_buffer() -> None:
    assert statistics(staging_bytes=2**25).ratio == statistics(staging_bytes=2**27).ratio


def test_one_chunk_by_hand() -> None:
    found = statistics(prompt_tokens=4097)  # 4096 tokens: 2048 dense, then 2048 rows over 16 pages of 256
    assert (found.rows, found.pages) == (2_048, 16)
    assert found.ratio_without_probe == pytest.approx(2_048 * 2_080 / (16 * 256))


@pytest.mark.parametrize("question", [{"layout": "vram"}, {"prefill": "naive"}])
def test_no_ratio_where_nothing_is_staged(question: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match="staged"):
        statistics(**question)
    with pytest.raises(BadValue, match="2,048 tokens"):
        statistics(prompt_tokens=2_048)
