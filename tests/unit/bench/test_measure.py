"""Every measure on a trace whose answer is worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import theory
from paceline.bench import measure
from paceline.bench.machine import Machine
from paceline.bench.measure import KVLayout
from paceline.bench.results import append_records, by_arm, read_records, summarise
from paceline.bench.statistics import quantile
from paceline.errors import BenchmarkError
from tests.unit.bench.factory import ARMS, agent_run, drafted, run_info, step, turn

# Latency and throughput


def test_a_token_is_charged_its_share_of_its_step() -> None:
    turns = [turn([step(100.0), step(40.0, 4), step(12.0)])]
    assert [(each.ms, each.num_tokens) for each in measure.token_latencies(turns)] == [(10.0, 4), (12.0, 1)]


def test_p95_over_tokens_counts_tokens_not_steps() -> None:
    slow, fast = [step(50.0)], [step(10.0, 10)] * 10  # 1 token of 50 ms beside 100 tokens of 1 ms
    turns = [turn([step(999.0), *slow, *fast])]
    assert measure.token_ms_quantile(turns, 0.95) == 1.0
    assert measure.token_ms_quantile(turns, 1.0) == 50.0
    assert measure.token_ms_quantile([turn([step(999.0), *slow, *fast[:1]])], 0.95) == 50.0  # 1 of 11 is more than 5 %


def test_p95_over_turns_takes_the_mean_of_each_turn() -> None:
    slow = turn([step(7.0), step(50.0), step(10.0, 2)], turn=0)  # 60 ms for 3 tokens
    fast = [turn([step(7.0), step(4.0, 4)], turn=i) for i in range(1, 20)]
    empty = turn([step(7.0)], turn=20)
    assert measure.turn_tpots([slow, *fast[:1], empty]) == [20.0, 1.0]
    assert quantile(measure.turn_tpots([slow, *fast]), 0.95) == 1.0
    assert quantile(measure.turn_tpots([slow, *fast[1:]]), 0.95) == 20.0


def test_decode_rate_is_a_ratio_of_sums_without_first_steps() -> None:
    turns = [turn([step(500.0), step(100.0, 1)]), turn([step(500.0), step(100.0, 9)])]
    assert measure.decode_tokens_per_s(turns) == pytest.approx(50.0)  # 10 tokens in 0.2 s, not the mean of 10 and 90


def test_turns_that_generated_one_token_have_no_decode_rate() -> None:
    turns = [turn([step(500.0)])]
    assert measure.decode_tokens_per_s(turns) == 0.0
    assert measure.token_ms_quantile(turns, 0.95) == 0.0


def test_time_to_first_token_is_kept_apart_for_cold_and_warm_turns() -> None:
    turns = [turn([step(300.0), step()]), turn([step(20.0)], is_cold=False), turn([step(30.0)], is_cold=False), turn()]
    assert measure.ttfts(turns) == [300.0, 20.0, 30.0]
    assert measure.ttfts(turns, is_cold=True) == [300.0]
    assert measure.ttfts(turns, is_cold=False) == [20.0, 30.0]
    arm = summarise([*turns[:1], turn([step(20.0)], turn=1, is_cold=False)], run_info())["arms"]["dynamic"]
    assert (arm["ttft_ms_p50"], arm["ttft_cold_ms_p50"], arm["ttft_warm_ms_p50"]) == (20.0, 300.0, 20.0)


# Acceptance and horizon

ROUNDS = [step(), drafted(4, 4), drafted(4, 1), drafted(2, 2), drafted(2, 0), step(), drafted(1, 1)]


def test_acceptance_is_accepted_over_drafted() -> None:
    assert measure.acceptance_rate(ROUNDS) == pytest.approx(8 / 13)
    assert measure.acceptance_rate([step()]) == 0.0


def test_acceptance_length_counts_rounds_and_horizon_counts_decoding_steps() -> None:
    turns = [turn(ROUNDS)]
    assert measure.mean_acceptance_length(turns) == pytest.approx(1 + 8 / 5)
    assert measure.mean_horizon(turns) == pytest.approx(13 / 6)
    assert measure.mean_acceptance_length([turn([step()])]) == 1.0
    assert measure.mean_horizon([turn([step()])]) == 0.0


def test_a_first_step_that_drafted_is_a_decoding_step() -> None:
    assert measure.mean_horizon([turn([drafted(4, 0), step()])]) == 2.0


def test_acceptance_by_position_is_conditional_on_the_drafts_before() -> None:
    first, second, third, fourth = measure.acceptance_by_position([turn(ROUNDS)])
    assert (first.position, first.num_drafted, first.num_reached, first.num_accepted) == (1, 5, 5, 4)
    assert (second.num_drafted, second.num_reached, second.num_accepted) == (4, 3, 2)  # one of (2, 0) never got there
    assert (third.num_drafted, third.num_reached, third.num_accepted) == (2, 1, 1)
    assert (fourth.num_drafted, fourth.num_reached, fourth.num_accepted) == (2, 1, 1)
    assert (second.conditional, second.survival) == (pytest.approx(2 / 3), 0.5)


def test_a_position_never_reached_has_no_conditional_acceptance() -> None:
    _, second = measure.acceptance_by_position([turn([drafted(2, 0)])])
    assert second.conditional is None
    assert second.survival == 0.0


def test_acceptance_is_kept_by_kind_of_text_and_by_source() -> None:
    turns = [
        turn([step(), drafted(4, 4), drafted(4, 2, source="model")], kind="edit"),
        turn([step(), drafted(2, 0), step()], kind="prose", turn=1),
        turn([step(), step()], kind="new code", turn=2),
    ]
    arm = summarise(turns, run_info())["arms"]["dynamic"]
    assert arm["acceptance_by_kind"] == {"edit": 0.75, "prose": 0.0}  # new code: nothing was drafted
    assert arm["mean_horizon_by_kind"] == {"edit": 4.0, "prose": 1.0, "new code": 0.0}
    assert arm["acceptance_by_source"] == {
        "suffix": {"drafted": 6, "accepted": 4, "rate": pytest.approx(2 / 3)},
        "model": {"drafted": 4, "accepted": 2, "rate": 0.5},
    }


# The closed form


def test_with_one_horizon_the_prediction_is_the_closed_form() -> None:
    plain = [turn([step(), *[step(forward_ms=10.0)] * 5])]
    rounds = [drafted(3, n, forward_ms=14.0, draft_ms=1.5) for n in (3, 3, 2, 0)]
    prediction = measure.predict([turn([step(), *rounds])], plain)
    assert prediction is not None
    assert (prediction.one_row_ms, prediction.cost_ratio, prediction.verify_cost) == (10.0, 0.05, 1.4)
    assert prediction.speedup == pytest.approx(theory.speedup([3 / 4, 1.0, 2 / 3], 0.05, 1.4))


def test_steps_without_drafts_are_predicted_to_give_one_token() -> None:
    plain = [turn([step(), step(forward_ms=10.0)])]
    mixed = [turn([step(), step(forward_ms=10.0), drafted(1, 1, forward_ms=10.0)])]
    prediction = measure.predict(mixed, plain)
    assert prediction is not None
    assert prediction.speedup == pytest.approx(1.5)


def test_nothing_is_predicted_without_drafts_or_times() -> None:
    plain = [turn([step(), step(forward_ms=10.0)])]
    assert measure.predict(plain, plain) is None
    assert measure.predict([turn([step(), drafted(2, 1)])], plain) is None
    assert measure.predict([turn([step(), drafted(2, 1, forward_ms=9.0)])], []) is None


# Memory


def test_waste_is_the_mean_over_steps() -> None:
    turns = [
        turn([step(filled_slots=12, reserved_slots=16), step(filled_slots=16, reserved_slots=16)]),
        turn([step(filled_slots=50, reserved_slots=100), step()]),
    ]
    assert measure.kv_waste(turns) == pytest.approx((0.25 + 0.0 + 0.5) / 3)


def test_waste_is_unknown_where_no_step_knew_its_slots() -> None:
    assert measure.kv_waste([turn([step(), step()])]) is None


def test_a_session_ends_with_its_longest_context() -> None:
    turns = [
        turn([step(), step()], task_id="a", num_prompt_tokens=100),
        turn([step(num_tokens=5)], task_id="a", turn=1, num_prompt_tokens=300),
        turn([step()], task_id="b", num_prompt_tokens=50),
    ]
    assert measure.final_contexts(turns) == [305, 51]


def test_sessions_that_fit_paged_and_contiguous() -> None:
    contexts = [160, 320, 1600]  # 10, 20, 100 blocks of 16: 130 / 3 on average
    budget = 4 * 2048 * 100
    paged, contiguous = KVLayout(16, 100), KVLayout(2048, 100)
    assert measure.peak_sessions(contexts, contiguous, budget) == 4
    assert measure.peak_sessions(contexts, contiguous, budget, 0.95) == 4
    assert measure.peak_sessions(contexts, paged, budget) == 11  # 512 blocks / 43.3
    assert measure.peak_sessions(contexts, paged, budget, 0.95) == 5  # 512 blocks / 100
    assert measure.peak_sessions([161], paged, 16 * 100 * 22) == 2  # a begun block is a whole one


def test_a_draft_models_keys_and_values_count_against_the_budget() -> None:
    assert measure.peak_sessions([16], KVLayout(16, 150), 16 * 300) == 2
    assert measure.peak_sessions([16], KVLayout(16, 100), 16 * 300) == 3


def test_peak_rss_is_the_largest() -> None:
    assert measure.peak_rss_mib([turn(peak_rss_mib=5.0), turn(peak_rss_mib=7.0), turn(peak_rss_mib=6.0)]) == 7.0


# Identity


def test_identity_is_by_task_and_turn_and_of_all_tokens() -> None:
    reference = [turn(token_ids=(1, 2, 3), turn=i) for i in range(4)]
    ours = [
        turn(token_ids=[1, 2, 3], turn=0),
        turn(token_ids=(1, 2), turn=1),
        turn(token_ids=(1, 2, 4), turn=2),
        turn(token_ids=(1, 2, 3), turn=9),
    ]
    assert measure.identical_turns(ours, reference) == (1, 3)
    assert measure.identical_turns(ours, []) == (0, 0)


# The log


def test_a_log_gives_back_what_was_appended(tmp_path: Path) -> None:
    records = [
        turn([step(1 / 3), drafted(3, 2, draft_ms=0.1)], extra={"text": "día\n"}),
        turn(turn=1),
    ]
    log = tmp_path / "new" / "turns.jsonl"
    assert read_records(log) == []
    append_records(log, records)
    append_records(log, [])
    append_records(log, records[:1])
    assert read_records(log) == [*records, records[0]]
    assert len(log.read_text().splitlines()) == 3


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_line_cut_off_by_a_kill_is_dropped_and_then_overwritten(tmp_path: Path, kept: int) -> None:
    first, second, third = (turn([step()], turn=i) for i in range(3))
    log = tmp_path / "turns.jsonl"
    append_records(log, [first])
    whole = log.stat().st_size
    append_records(log, [second])
    content = log.read_bytes()
    log.write_bytes(content[: whole + kept] if kept > 0 else content[:kept])
    assert read_records(log) == [first]
    append_records(log, [third])
    assert read_records(log) == [first, third]


def test_a_log_of_one_cut_off_line_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "turns.jsonl"
    log.write_text('{"arm": "dy')
    assert read_records(log) == []
    append_records(log, [turn()])
    assert read_records(log) == [turn()]


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"arm": "a", "steps": {}, "token_ids": []}'])
def test_a_damaged_line_inside_the_log_is_named(tmp_path: Path, line: str) -> None:
    log = tmp_path / "turns.jsonl"
    append_records(log, [turn()])
    with log.open("a") as file:
        file.write(line + "\n")
    append_records(log, [turn(turn=1)])
    with pytest.raises(BenchmarkError, match="line 2"):
        read_records(log)


def test_a_column_that_a_past_version_did_not_write_takes_its_default(tmp_path: Path) -> None:
    log = tmp_path / "turns.jsonl"
    append_records(log, [turn([step()])])
    data = json.loads(log.read_text())
    del data["steps"]["draft_ms"]
    log.write_text(json.dumps(data) + "\n")
    assert read_records(log) == [turn([step()])]


# The summary

CONTRACT = {
    *("tasks", "turns", "tokens", "decode_tokens_per_s", "token_ms_p50", "token_ms_p95", "turn_tpot_ms_p95"),
    *("turn_ms_mean", "ttft_ms_p50", "acceptance_rate", "mean_acceptance_length", "mean_horizon", "kv_waste"),
    *("peak_sessions", "identical_to_autoregressive"),
}


def test_the_summary_has_exactly_the_public_keys() -> None:
    summary = summarise(agent_run(), run_info())
    assert list(summary) == ["machine", "model", "draft", "suite", "not_run", "peers", "arms", "ratios"]
    assert list(summary["arms"]) == list(ARMS)
    for arm in summary["arms"].values():
        assert set(arm) >= CONTRACT
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_each_arm_is_compared_with_both_baselines_but_not_with_itself() -> None:
    ratios = summarise(agent_run(num_tasks=2), run_info())["ratios"]
    assert list(ratios["dynamic"]) == ["autoregressive", "autoregressive-contiguous"]
    assert list(ratios["autoregressive"]) == ["autoregressive-contiguous"]
    assert ratios["dynamic"]["autoregressive"]["decode_speedup"]["tasks"] == 2


def test_without_a_baseline_there_are_no_ratios_and_nothing_is_called_identical() -> None:
    summary = summarise(agent_run(["dynamic"], num_tasks=2), run_info())
    assert summary["ratios"] == {"dynamic": {}}
    assert summary["arms"]["dynamic"]["identical_to_autoregressive"] == {"count": 0, "total": 0}


def test_an_engine_that_reports_no_slots_has_no_memory_figures() -> None:
    arm = summarise([turn([step(), step()], arm="other")], run_info())["arms"]["other"]
    assert arm["kv_waste"] is None
    assert arm["peak_sessions"] is None


def test_a_turn_run_again_replaces_the_first_run() -> None:
    first, again = turn([step(), step(5.0)]), turn([step(), step(7.0)])
    assert by_arm([first, again]) == {"dynamic": [again]}


def test_arms_stand_in_their_own_order_whatever_order_they_ran_in() -> None:
    names = ["llama.cpp", "dynamic", "static-4", "autoregressive", "static-2", "autoregressive-contiguous"]
    expected = ["autoregressive-contiguous", "autoregressive", "static-2", "static-4", "dynamic", "llama.cpp"]
    assert list(by_arm([turn([step()], arm=name) for name in names])) == expected


def test_the_machine_is_described() -> None:
    machine = Machine.here(num_threads=1).to_dict()
    assert machine["processor"]
    assert machine["num_usable_cores"] >= 1
    assert machine["versions"]["packages"]["numpy"]
    json.dumps(machine, allow_nan=False)
