"""Random workloads on small caches: every step is checked, every request ends with the right tokens."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from paceline import CacheCapacityError
from tests.unit.engine.workshop import Workshop

SESSIONS = ["a", "b", "c"]
# Prompts are prefixes of few texts, so that they share blocks.
TEXTS = [[2 + (i * step) % 60 for i in range(40)] for step in (1, 7, 11)]

arrivals = st.tuples(
    st.just("add"),
    st.integers(0, len(TEXTS) - 1),
    st.integers(1, 30),  # prompt length
    st.integers(1, 16),  # max_tokens
    st.integers(0, 6),  # horizon
    st.sampled_from([None, None, *SESSIONS]),
)
actions = st.one_of(
    arrivals,
    arrivals,
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("release"), st.sampled_from(SESSIONS)),
    st.tuples(st.just("fork"), st.sampled_from(SESSIONS), st.sampled_from([f"{name}2" for name in SESSIONS])),
)


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(3, 16),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 16),
    prompt_budget=st.integers(1, 16),
    max_num_seqs=st.integers(1, 5),
    workload=st.lists(actions, min_size=2, max_size=30),
)
def test_every_request_ends_with_the_right_tokens(
    num_blocks: int, block_size: int, budget: int, prompt_budget: int, max_num_seqs: int, workload: list[tuple]
) -> None:
    shop = Workshop(
        num_blocks,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_prompt_tokens=prompt_budget,
        max_num_seqs=max_num_seqs,
    )
    forks: set[str] = set()
    for action, *arguments in workload:
        if action == "add":
            text, length, max_tokens, horizon, session_id = arguments
            is_too_big = length + max_tokens - 1 > num_blocks * block_size
            try:
                shop.add(TEXTS[text][:length], max_tokens, horizon=horizon, session_id=session_id)
            except CacheCapacityError:
                assert is_too_big
            else:
                assert not is_too_big
        elif action == "step":
            for _ in range(arguments[0]):
                if shop.scheduler.has_work:
                    shop.step()
        elif action == "cancel":
            if arguments[0] < len(shop.requests) and not shop.requests[arguments[0]].is_finished:
                shop.scheduler.finish(shop.requests[arguments[0]], "cancelled")
        elif action == "release":
            shop.scheduler.release_session(arguments[0])
        elif arguments[1] not in forks:
            shop.scheduler.fork_session(*arguments)
            forks |= set(shop.scheduler._sessions) & {arguments[1]}
        shop.cache.check_integrity()
    shop.run()
    event(f"preemptions: {min(3, sum(request.num_preemptions for request in shop.requests))}")
    for session_id in list(shop.scheduler._sessions):
        shop.scheduler.release_session(session_id)
    assert shop.cache.num_used_blocks == 0
    shop.cache.check_integrity()
