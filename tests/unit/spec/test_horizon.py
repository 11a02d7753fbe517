"""How many tokens to draft next."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.request import MAX_SPEC_TOKENS, Speculation
from paceline.spec.horizon import DynamicHorizon, FixedHorizon, Horizon, make_horizon


def rounds(horizon: Horizon, num_rounds: int, depth: float) -> list[int]:
    """Horizons chosen against a drafter whose drafts are right up to ``depth``."""
    chosen = []
    for _ in range(num_rounds):
        chosen.append(horizon.choose())
        if chosen[-1] > 0:
            horizon.observe(chosen[-1], int(min(chosen[-1], depth)))
    return chosen


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (Speculation("off"), [0, 0, 0, 0]),
        (Speculation("static", 1), [1, 1, 1, 1]),
        (Speculation("static", 64), [64, 64, 64, 64]),
    ],
)
def test_fixed(speculation: Speculation, expected: list[int]) -> None:
    assert rounds(make_horizon(speculation), 4, depth=0) == expected


def test_modes_have_their_controllers() -> None:
    assert isinstance(make_horizon(Speculation("dynamic", 5)), DynamicHorizon)
    assert isinstance(make_horizon(Speculation("static", 5)), FixedHorizon)
    assert isinstance(make_horizon(Speculation("off")), FixedHorizon)


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 8, 16, 64])
def test_rises_to_the_limit_while_everything_is_accepted(max_tokens: int) -> None:
    chosen = rounds(DynamicHorizon(max_tokens), 60, depth=1000)
    assert chosen == sorted(chosen)
    assert chosen[-1] == max_tokens


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_settles_a_little_beyond_what_is_accepted(depth: int) -> None:
    settled = rounds(DynamicHorizon(16), 80, depth)[-20:]
    assert depth <= min(settled)
    assert max(settled) <= 2 * depth + 2


def test_falls_when_acceptance_falls() -> None:
    horizon = DynamicHorizon(8)
    assert rounds(horizon, 20, depth=8)[-1] == 8
    fallen = rounds(horizon, 20, depth=1)
    assert fallen[-1] < 4
    assert all(later <= earlier for earlier, later in itertools.pairwise(fallen))


@pytest.mark.parametrize("max_tokens", [1, 8, 64])
def test_a_drafter_that_is_always_wrong_is_asked_less_and_less(max_tokens: int) -> None:
    horizon = DynamicHorizon(max_tokens)
    chosen = rounds(horizon, 2000, depth=0)
    paused = chosen.index(0)
    assert paused <= 24
    assert sum(chosen[:paused]) <= 8 * max_tokens + 40
    probes = [at for at in range(paused, 2000) if chosen[at] > 0]
    assert all(chosen[at] <= 2 for at in probes)
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (9, 65)
    assert sum(chosen[paused:]) <= 2 * (2000 / 65 + 5)


@pytest.mark.parametrize("num_failures", [0, 1, 5])
def test_a_probe_that_succeeds_ends_the_pause(num_failures: int) -> None:
    horizon = DynamicHorizon(8)
    while horizon.choose() > 0:
        horizon.observe(4, 0)
    for _ in range(num_failures):
        while (probe := horizon.choose()) == 0:
            pass
        horizon.observe(probe, 0)
    while (probe := horizon.choose()) == 0:
        pass
    horizon.observe(probe, probe)
    recovered = rounds(horizon, 30, depth=8)
    assert recovered[0] > probe
    assert 0 not in recovered
    assert recovered[-1] == 8
    # The next pause is a short one again.
    chosen = rounds(horizon, 60, depth=0)
    first = chosen.index(0)
    assert chosen[first : first + 5] == [0, 0, 0, 0, 2]


def test_rounds_without_a_draft_teach_nothing() -> None:
    horizon = DynamicHorizon(8)
    before = horizon.choose()
    for _ in range(100):
        horizon.observe(0, 0)
        assert horizon.choose() == before


@given(
    max_tokens=st.integers(1, MAX_SPEC_TOKENS),
    outcomes=st.lists(st.tuples(st.integers(0, MAX_SPEC_TOKENS), st.integers(0, MAX_SPEC_TOKENS)), max_size=200),
)
def test_always_between_zero_and_the_limit(max_tokens: int, outcomes: list[tuple[int, int]]) -> None:
    horizon = DynamicHorizon(max_tokens)
    num_zeros = 0
    for drafted, accepted in outcomes:
        chosen = horizon.choose()
        assert 0 <= chosen <= max_tokens
        num_zeros = num_zeros + 1 if chosen == 0 else 0
        assert num_zeros <= 64  # no pause is for ever
        drafted = min(drafted, chosen)
        horizon.observe(drafted, min(drafted, accepted))


def test_a_short_draft_that_was_all_accepted_says_at_least() -> None:
    horizon = DynamicHorizon(8)
    for _ in range(60):
        horizon.choose()
        horizon.observe(1, 1)  # counts as two: one more might have been accepted as well
    assert horizon.choose() == 4
