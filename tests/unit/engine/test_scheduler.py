"""Who runs, with how many tokens, on whose blocks."""

from __future__ import annotations

import pytest

from paceline import CacheCapacityError
from paceline.engine.plan import Plan
from paceline.request import Request, RequestStatus
from tests.unit.engine.workshop import Workshop, continuation


def prompt(length: int, first: int = 2) -> list[int]:
    return [first + i % 50 for i in range(length)]


def shares(plan: Plan) -> list[tuple[str, int, int]]:
    """(request, new tokens, horizon) of each scheduled request, in order."""
    return [(item.request.request_id, item.num_new_tokens, item.horizon) for item in plan.scheduled]


# ---- the budget ----------------------------------------------------------------------------------------------------


def test_decodes_come_before_prompts() -> None:
    shop = Workshop(64, max_num_batched_tokens=8)
    shop.add(prompt(6), 9)
    shop.add(prompt(20, 7), 9)
    assert shares(shop.step()) == [("r0", 6, 0), ("r1", 2, 0)]
    assert shares(shop.step()) == [("r0", 1, 0), ("r1", 7, 0)]
    shop.run()


def test_a_short_prompt_passes_a_long_one_that_is_not_due_yet() -> None:
    shop = Workshop(64, max_num_batched_tokens=8)
    shop.add(prompt(6), 9)
    shop.add(prompt(20, 7), 9)
    shop.step()
    shop.add(prompt(3, 9), 9, horizon=4)
    assert shares(shop.step()) == [("r0", 1, 0), ("r2", 3, 0), ("r1", 4, 0)]
    shop.run()


def test_short_prompts_cannot_starve_a_long_one() -> None:
    shop = Workshop(64, max_num_batched_tokens=8)
    long = shop.add(prompt(20), 2)
    for first in range(20, 40):
        shop.add(prompt(6, first), 1)
        shop.step()
    # It was due after 20 tokens of work, whoever came later; beside it fit what came before that.
    done = [sum(item.num_new_tokens for item in plan.scheduled) for plan in shop.plans]
    first_sampled = next(i for i, plan in enumerate(shop.plans) if long in [item.request for item in plan.sampled])
    assert sum(done[: first_sampled + 1]) <= 2 * 20 + 8
    shop.run()


def test_what_is_cached_need_not_be_read_and_is_due_sooner() -> None:
    shop = Workshop(64, max_num_batched_tokens=8)
    shop.add(prompt(16), 1)
    shop.run()
    shop.add(prompt(12, 40), 2)
    shop.add([*prompt(16), 9, 9, 9], 2)
    assert shares(shop.step()) == [("r2", 3, 0), ("r1", 5, 0)]
    shop.run()


def test_prompts_take_a_part_of_a_step_in_which_others_decode() -> None:
    shop = Workshop(64, max_num_batched_tokens=16, max_num_prompt_tokens=3)
    shop.add(prompt(10), 4)
    assert shares(shop.step()) == [("r0", 10, 0)]
    shop.add(prompt(5, 20), 2)
    shop.add(prompt(6, 30), 2)
    assert shares(shop.step()) == [("r0", 1, 0), ("r1", 3, 0)]
    assert shares(shop.step()) == [("r0", 1, 0), ("r1", 2, 0), ("r2", 1, 0)]
    shop.run()


def test_nobody_drafts_while_a_prompt_is_read() -> None:
    shop = Workshop(64, max_num_batched_tokens=8)
    shop.add(prompt(4), 30, horizon=6)
    shop.step()
    shop.add(prompt(10, 9), 4)
    assert shares(shop.step()) == [("r0", 1, 0), ("r1", 7, 0)]
    assert shares(shop.step()) == [("r0", 1, 0), ("r1", 3, 0)]
    assert shares(shop.step()) == [("r0", 1, 6), ("r1", 1, 0)]
    shop.run()


def test_those_who_run_draft_on_when_a_newcomer_finds_no_place() -> None:
    shop = Workshop(64, max_num_seqs=1)
    shop.add(prompt(4), 30, horizon=6)
    shop.step()
    shop.add(prompt(10, 9), 4)
    assert [item.horizon for item in shop.step().scheduled] == [0]  # it tried
    assert [item.horizon for item in shop.step().scheduled] == [6]
    shop.run()


@pytest.mark.parametrize(
    ("length", "chunks"), [(1, [1]), (7, [7]), (8, [8]), (9, [8, 1]), (16, [8, 8]), (17, [8, 8, 1])]
)
def test_long_prompts_are_prefilled_in_chunks(length: int, chunks: list[int]) -> None:
    shop = Workshop(64, max_num_batched_tokens=8)
    shop.add(prompt(length), 3)
    plans = [shop.step() for _ in chunks]
    assert [plan.scheduled[0].num_new_tokens for plan in plans] == chunks
    assert [len(plan.sampled) for plan in plans] == [0] * (len(chunks) - 1) + [1]
    assert [len(plan.scheduled[0].block_ids) for plan in plans] == [
        -(-sum(chunks[: i + 1]) // 4) for i in range(len(chunks))
    ]
    shop.run()


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_smallest_budgets_still_serve_everyone(budget: int) -> None:
    shop = Workshop(64, max_num_batched_tokens=budget)
    for first in (3, 4, 5):
        shop.add(prompt(9, first), 9, horizon=5)
    shop.run()


@pytest.mark.parametrize("prompt_length", [1, 5])
def test_a_newcomer_that_drafts_at_once_stays_within_the_budget(prompt_length: int) -> None:
    shop = Workshop(64, max_num_batched_tokens=8)
    for first in (2, 9, 9):  # the third finds all but one token of its prompt in the cache
        shop.add(prompt(prompt_length, first), 9, horizon=6)
    shop.run()
    for first in (2, 9):
        shop.add(prompt(prompt_length, first), 9, horizon=6)
    assert shares(shop.step()) == [("r3", 1, 6), ("r4", 1, 0)]
    shop.run()


@pytest.mark.parametrize(
    ("max_tokens", "horizons"),
    # The first token comes with the prefill; one is always sampled besides the drafts.
    [(1, []), (2, [0]), (3, [1]), (5, [3]), (6, [4]), (7, [4, 0]), (8, [4, 1]), (12, [4, 4, 0])],
)
def test_no_draft_beyond_the_last_token(max_tokens: int, horizons: list[int]) -> None:
    shop = Workshop(64)
    shop.misses_every = 1000
    shop.add(prompt(4), max_tokens, horizon=4)
    shop.run()
    assert [plan.scheduled[0].horizon for plan in shop.plans[1:]] == horizons


def test_no_draft_where_blocks_are_lacking_for_it() -> None:
    shop = Workshop(4)
    shop.add(prompt(7), 10, horizon=4)
    shop.add(prompt(7, 30), 1)
    shop.step()
    assert shares(shop.step()) == [("r0", 1, 4)]  # the second one has finished
    shop = Workshop(4)
    shop.add(prompt(7), 9, horizon=4)
    shop.add(prompt(7, 30), 2)
    shop.step()
    assert shares(shop.step()) == [("r0", 1, 0), ("r1", 1, 0)]
    shop.run()


# ---- admission and preemption --------------------------------------------------------------------------------------


def test_admission_waits_until_the_whole_prompt_fits() -> None:
    shop = Workshop(6, max_num_batched_tokens=4)
    first = shop.add(prompt(10), 4)
    second = shop.add(prompt(16, 30), 4)
    while not first.is_finished:
        shop.step()
        assert second.status is RequestStatus.WAITING or first.is_finished
    assert shares(shop.step()) == [("r1", 4, 0)]
    shop.run()


def test_nobody_is_admitted_past_one_that_is_due_and_does_not_fit() -> None:
    shop = Workshop(6)
    shop.add(prompt(10), 6)
    shop.step()
    shop.add(prompt(16, 30), 2)
    for _ in range(3):
        shop.step()
    shop.add(prompt(14, 40), 2)  # due later than the one before it, and no room for that one yet
    assert shares(shop.step()) == [("r0", 1, 0)]
    shop.run()


def test_no_more_than_max_num_seqs_run() -> None:
    shop = Workshop(64, max_num_seqs=2)
    for first in (2, 3, 4):
        shop.add(prompt(5, first), 3)
    assert len(shop.step().scheduled) == 2
    assert (shop.scheduler.num_running, shop.scheduler.num_waiting) == (2, 1)
    shop.run()


def test_the_youngest_gives_way_and_comes_back_with_the_same_output() -> None:
    shop = Workshop(8, max_num_seqs=4)
    oldest, middle, youngest = (shop.add(prompt(8, first), 12) for first in (2, 20, 40))
    shop.run()
    assert oldest.num_preemptions == 0
    assert youngest.num_preemptions >= 1
    assert middle.num_preemptions <= youngest.num_preemptions
    preempted = [request for plan in shop.plans for request in plan.preempted]
    assert preempted[0] is youngest
    # What they found in the cache on their return was their own.
    assert [request.num_cached_tokens for request in shop.requests] == [0, 0, 0]
    assert shop.cache.num_used_blocks == 0


def test_a_preempted_request_comes_back_before_those_who_never_ran() -> None:
    shop = Workshop(8)
    for first in (2, 20, 40):
        shop.add(prompt(8, first), 12)
    shop.step()
    shop.add(prompt(30, 50), 2)
    shop.run()
    starts = [name for plan in shop.plans for name, num_new, _ in shares(plan) if num_new > 1]
    assert starts == ["r0", "r1", "r2", "r1", "r2", "r3"]


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"), [(8, 9, True), (8, 10, False), (16, 1, True), (17, 1, False)]
)
def test_what_can_never_fit_is_refused(length: int, max_tokens: int, fits: bool) -> None:
    shop = Workshop(4)
    if fits:
        shop.add(prompt(length), max_tokens)
        shop.run()
        return
    with pytest.raises(CacheCapacityError, match=f"may grow to {length + max_tokens} tokens"):
        shop.add(prompt(length), max_tokens)
    assert not shop.scheduler.has_work


def test_an_older_prefill_is_not_stopped_by_a_younger_decode() -> None:
    # The third, being short, has passed the second. Blocks are lacking for the second's last chunk until the first is
    # gone; then both need more of them, and the younger one gives way.
    shop = Workshop(6, max_num_batched_tokens=9)
    for first, length, max_tokens, horizon in ((2, 4, 3, 6), (15, 13, 9, 2), (28, 4, 9, 2)):
        shop.add(prompt(length, first), max_tokens, horizon=horizon)
    shop.run()
    assert shares(shop.plans[2]) == [("r0", 1, 0), ("r2", 1, 0)]
    assert shares(shop.plans[3]) == [("r2", 1, 0), ("r1", 5, 0)]  # the decode first, young as it is
    assert shop.requests[2].num_preemptions == 1
    assert shop.requests[1].num_preemptions == 0


# ---- ends ----------------------------------------------------------------------------------------------------------


def finish_everything(shop: Workshop, cancelled: Request) -> None:
    assert cancelled.is_finished
    assert cancelled.finish_reason == "cancelled"
    shop.cache.check_integrity()
    shop.run()
    assert shop.cache.num_used_blocks == 0


def test_cancelling_a_waiting_request() -> None:
    shop = Workshop(16, max_num_seqs=1)
    shop.add(prompt(5), 5)
    waiting = shop.add(prompt(5, 9), 5)
    shop.step()
    shop.scheduler.finish(waiting, "cancelled")
    assert shop.scheduler.num_waiting == 0
    finish_everything(shop, waiting)


def test_cancelling_amid_a_prefill() -> None:
    shop = Workshop(16, max_num_batched_tokens=4)
    request = shop.add(prompt(14), 5)
    shop.step()
    shop.step()
    shop.scheduler.finish(request, "cancelled")
    assert shop.cache.num_used_blocks == 0
    assert shop.cache.match_prefix(prompt(14)).num_tokens == 8  # what was computed stays useful
    finish_everything(shop, request)


def test_cancelling_amid_decoding_and_a_preempted_one() -> None:
    shop = Workshop(8)
    first, second, third = (shop.add(prompt(8, first), 12, horizon=2) for first in (2, 20, 40))
    while not third.num_preemptions:
        shop.step()
    assert third.status is RequestStatus.WAITING
    shop.scheduler.finish(third, "cancelled")
    shop.scheduler.finish(first, "cancelled")
    assert not second.is_finished
    finish_everything(shop, third)


# ---- sessions ------------------------------------------------------------------------------------------------------


def hold(shop: Workshop, session_id: str, first: int, length: int = 8) -> None:
    """Leave a session that keeps ``length`` tokens referenced."""
    shop.add(prompt(length, first), 1, session_id=session_id)
    shop.run()


def test_a_session_keeps_whole_verified_blocks() -> None:
    shop = Workshop(16)
    request = shop.add(prompt(9), 4, horizon=2, session_id="s")
    shop.run()
    assert shop.cache.num_used_blocks == (request.num_tokens - 1) // 4
    following = shop.add(request.token_ids, 2, session_id="s")
    shop.run()
    assert following.num_cached_tokens == 12
    shop.scheduler.release_session("s")
    shop.scheduler.release_session("s")
    assert shop.cache.num_used_blocks == 0


def test_idle_sessions_go_before_anyone_is_preempted_least_recently_used_first() -> None:
    shop = Workshop(8)
    for session_id, first in (("a", 2), ("b", 20), ("a", 2)):  # "b" is now the older one
        hold(shop, session_id, first)
    assert shop.cache.num_used_blocks == 4
    shop.add(prompt(16, 40), 2)
    shop.run()
    assert list(shop.scheduler._sessions) == ["a"]
    assert not any(plan.preempted for plan in shop.plans)
    shop.add(prompt(16, 30), 14)
    shop.run()
    assert not shop.scheduler._sessions
    assert not any(plan.preempted for plan in shop.plans)


def test_sessions_yield_to_a_newcomer_only_when_nothing_runs() -> None:
    shop = Workshop(8)
    hold(shop, "a", 2)
    runner = shop.add(prompt(8, 20), 8)
    shop.step()
    newcomer = shop.add(prompt(20, 40), 2)
    while not runner.is_finished:
        shop.step()
        assert newcomer.status is RequestStatus.WAITING or runner.is_finished
        assert "a" in shop.scheduler._sessions
    shop.run()


def test_a_fork_keeps_the_prefix_on_its_own() -> None:
    shop = Workshop(8)
    hold(shop, "a", 2)
    shop.scheduler.fork_session("a", "b")
    shop.scheduler.fork_session("unknown", "c")
    assert shop.cache.num_used_blocks == 2
    shop.scheduler.release_session("a")
    assert shop.cache.num_used_blocks == 2
    shop.scheduler.release_session("b")
    assert shop.cache.num_used_blocks == 0


def test_a_cancelled_turn_leaves_the_session_its_blocks() -> None:
    shop = Workshop(16)
    hold(shop, "a", 2)
    turn = shop.add(prompt(12), 8, session_id="a")
    shop.scheduler.finish(turn, "cancelled")
    assert shop.cache.num_used_blocks == 2
    turn = shop.add(prompt(12), 8, session_id="a")
    shop.step()
    shop.scheduler.finish(turn, "cancelled")
    assert shop.cache.num_used_blocks == 3


def test_the_fake_model_is_its_own_oracle() -> None:
    shop = Workshop(4)
    request = shop.add(prompt(3), 5, horizon=3)
    shop.step()
    shop.target._slots[request.num_computed_tokens - 3 + shop.cache.block_ids("r0")[0] * 4] ^= 1
    with pytest.raises(AssertionError):
        shop.run()
    assert request.output_token_ids != continuation(prompt(3), 5)
