"""Acceptance by evidence, and how far it is off."""

from __future__ import annotations

import random

import pytest

from paceline.spec.calibration import PRIORS, Calibration, CalibrationError

KIND = ("suffix", "single")


def observe(calibration: Calibration, acceptance: float, rounds: int, session: str = "s", length: int = 3) -> None:
    rng = random.Random(1)
    for _ in range(rounds):
        is_accepted = rng.random() < acceptance
        calibration.observe(session, *KIND, length, int(is_accepted), ended_in_miss=not is_accepted)


def test_before_anything_is_observed_the_prior_decides() -> None:
    calibration = Calibration()
    values = calibration.acceptances("s", *KIND, 3, 40)
    assert len(values) == 40
    assert values[0] == PRIORS[KIND][3]
    assert values[-1] == PRIORS[KIND][-1]
    assert calibration.acceptances("s", "new", "kind", 0, 3) == [0.5] * 3


def test_a_draft_grows_into_the_bins_of_longer_matches() -> None:
    calibration = Calibration()
    whole = calibration.acceptances("s", *KIND, 3, 30)
    for offset in (1, 2, 5, 9, 20):
        assert whole[offset:] == calibration.acceptances("s", *KIND, 3 + offset, 30 - offset)


@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.95])
def test_learns_what_it_sees(acceptance: float) -> None:
    calibration = Calibration()
    observe(calibration, acceptance, 400)
    assert calibration.acceptances("s", *KIND, 3, 1)[0] == pytest.approx(acceptance, abs=0.08)
    assert calibration.acceptances("another", *KIND, 3, 1)[0] == pytest.approx(acceptance, abs=0.08)


def test_a_session_may_differ_from_all_others() -> None:
    calibration = Calibration()
    observe(calibration, 0.95, 500, "code")
    observe(calibration, 0.05, 60, "prose")
    assert calibration.acceptances("code", *KIND, 3, 1)[0] > 0.85
    assert calibration.acceptances("prose", *KIND, 3, 1)[0] < 0.35
    calibration.forget("prose")
    assert calibration.acceptances("prose", *KIND, 3, 1)[0] > 0.6


def test_nothing_behind_a_miss_is_counted() -> None:
    calibration = Calibration()
    before = calibration.acceptances("s", *KIND, 3, 4)
    calibration.observe("s", *KIND, 3, 1, ended_in_miss=True)  # lengths 3 (accepted) and 4 (not)
    after = calibration.acceptances("s", *KIND, 3, 4)
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert after[2:] == before[2:]


def test_sessions_are_forgotten_beyond_a_number() -> None:
    calibration = Calibration()
    for number in range(2000):
        observe(calibration, 0.0, 1, f"s{number}")
    assert len(calibration._sessions) <= 256


def test_calibration_error() -> None:
    error = CalibrationError()
    assert error.value is None
    for position in range(10):
        error.add([0.85], int(position < 8))  # 8 of 10 came true
    assert error.value == pytest.approx(0.05)
    error.add([0.05, 0.9, 0.9], 0)  # the miss is judged, what stands behind it is not
    assert error.value == pytest.approx((0.5 + 0.05) / 11)
