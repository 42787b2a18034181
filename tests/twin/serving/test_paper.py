"""Worlds to solve on paper: a second for every step, and one more for every prefilled token."""

import pytest

from tests.twin.serving.worlds import Affine, PagedPool, request, serve
from twin.serving.metrics import ServingResult


def times(result: ServingResult) -> list[tuple[str | int, float, float, float]]:
    """Id, queue, first and last token of every request, in the order in which they ended."""
    return [(each.id, each.queue_s, each.ttft_s, each.e2e_s) for each in result.requests]


def test_one_request() -> None:
    result = serve([request(0, 5, 4)])
    assert times(result) == [(0, 0.0, 6.0, 9.0)]  # 1 + 5 s for the first token, then 3 of 1 s
    assert result.requests[0].tpot_s == 1.0
    assert (result.total_s, result.busy_s, result.steps, result.output_tokens) == (9.0, 9.0, 4, 4)
    assert (result.itl_s.count, result.itl_s.mean) == (3, 1.0)
    assert (result.resident_max, result.resident_mean, result.output_tokens_per_s) == (1, 1.0, 4 / 9)
    chunked = serve([request(0, 10, 1)], batched_tokens=4)  # chunks of 4, 4 and 2
    assert (times(chunked), chunked.steps) == ([(0, 0.0, 13.0, 13.0)], 3)
    growing = serve([request(0, 10, 4)], costs=Affine(fixed_s=1.0, token_s=0.1))
    assert growing.total_s == pytest.approx(1 + 2.0 + 2.1 + 2.2)  # 10, 11 and 12 tokens are in the cache


def test_an_arrival_at_the_very_end_of_a_step_is_there_for_the_next() -> None:
    tenths = Affine(fixed_s=0.1)
    joins = serve([request(0, 1, 11), request(1, 1, 1, at=0.3)], costs=tenths)
    assert joins.requests[0].ttft_s == pytest.approx(0.1)  # 0.1 + 0.1 + 0.1 is more than 0.3, and nearly so
    stepped = serve([request(0, 1, 11), request(1, 1, 1, at=0.3)], costs=tenths, jump=False)
    assert stepped.total_s == pytest.approx(joins.total_s)


def test_who_does_not_fit_waits() -> None:
    pool = PagedPool(blocks=5, block_tokens=4)
    result = serve([request(index, 8, 4) for index in range(2)], pool=pool)
    # Each needs 3 blocks for 8 + 3 cached tokens. 1 and 0 hold 2 each, 0 takes the fifth, 1 is preempted at once.
    assert [(each.id, each.preemptions) for each in result.requests] == [(0, 0), (1, 1)]
    assert result.pool_peak_blocks == 4
    assert (result.preemptions, result.recomputed_tokens) == (1, 8)


def test_a_preempted_sequence_computes_prompt_and_output_again_unless_its_output_was_reserved() -> None:
    pool = PagedPool(blocks=4, block_tokens=4)
    result = serve([request(0, 4, 9), request(1, 4, 5)], pool=pool)
    # Both prefill to 9 s and hold 2 blocks from the first decode on, which ends at 10 and brings token 2. Steps to 13
    # bring token 5, which ends request 1; nobody is in the way of 0.
    assert times(result) == [(1, 0.0, 9.0, 13.0), (0, 0.0, 9.0, 17.0)]
    assert result.preemptions == 0
    tight = serve([request(0, 4, 9), request(1, 4, 6)], pool=pool)
    # 1 needs a third block for its 9th cached token, as 0 does at the same step, at 13 s: 0 is served first, 1 goes.
    # 0 goes on alone to its 9th token at 17. Then 1 computes 4 + 5 tokens in 10 s, and with them has its 6th token.
    assert times(tight) == [(0, 0.0, 9.0, 17.0), (1, 0.0, 9.0, 27.0)]
    assert (tight.preemptions, tight.recomputed_tokens, tight.itl_s.most) == (1, 8, 14.0)
    reserved = serve([request(0, 4, 9), request(1, 4, 6)], pool=pool, reserve_output=True)
    assert times(reserved) == [(0, 0.0, 5.0, 13.0), (1, 13.0, 18.0, 23.0)]  # 3 + 3 blocks are not there
    assert (reserved.preemptions, reserved.pool_peak_blocks) == (0, 3)


def test_a_prompt_is_let_in_whole_or_by_its_first_chunk() -> None:
    pool = PagedPool(blocks=4, block_tokens=4)
    requests = [request(0, 8, 5), request(1, 12, 1)]
    gated = serve(requests, pool=pool, batched_tokens=4)
    assert (gated.preemptions, gated.requests[1].queue_s) == (0, 14.0)
    # By its first chunk of 3 it gets in at 10 s; the second one finds no block, and so again until 0 has ended.
    eager = serve(requests, pool=pool, batched_tokens=4, reserve_prompt=False)
    assert (eager.requests[1].queue_s, eager.preemptions) == (10.0, 2)


def test_what_can_never_run_is_rejected_and_the_rest_goes_on() -> None:
    pool = PagedPool(blocks=4, block_tokens=4)
    requests = [request(0, 17, 1), request(1, 4, 2), request(2, 4, 14), request(3, 4, 13), request(4, 3, 30)]
    result = serve(requests, pool=pool, max_model_tokens=32)
    assert [each.id for each in result.requests] == [1, 3]  # 4 + 13 - 1 tokens are cached: 4 blocks
    assert result.rejected == {"pool": 2, "max_model_tokens": 1}
    reasons = {each.id: each.reason for each in result.rejections}
    assert reasons == {
        0: "needs 5 blocks, the pool has 4",
        2: "needs 5 blocks, the pool has 4",
        4: "33 tokens, the model takes 32",
    }


@pytest.mark.parametrize(("tokens_per_step", "steps"), [(1.0, 12), (2.0, 6), (2.5, 5), (4.0, 3)])
def test_speculation_divides_the_steps(tokens_per_step: float, steps: int) -> None:
    result = serve([request(0, 1, 13)], speculative=3, tokens_per_step=tokens_per_step)
    assert result.requests[0].e2e_s == 2 + steps
    assert (result.output_tokens, result.itl_s.count) == (13, steps)


def test_speculation_holds_blocks_and_takes_from_the_budget_for_its_drafts() -> None:
    pool = PagedPool(blocks=100, block_tokens=1)
    assert [serve([request(0, 10, 5)], pool=pool, speculative=drafts).pool_peak_blocks for drafts in (0, 3)] == [14, 17]
    crowd = [request(index, 1, 3) for index in range(9)]  # no more run than the budget can decode
    assert [serve(crowd, batched_tokens=4, speculative=drafts).resident_max for drafts in (0, 1)] == [4, 2]
