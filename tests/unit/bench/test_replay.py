"""Traces, and rules replayed on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import Engine, SamplingParams, Speculation
from paceline.bench import measure, score
from paceline.bench.recorded import RecordedProposer, record_drafts
from paceline.bench.records import Task, Turn
from paceline.bench.replay import make_ladder, replay_trace
from paceline.bench.trace import TraceTurn, read_trace, record_task, write_trace
from paceline.errors import BenchmarkError, InvalidParameterError

COPY = [2 + (7 * i) % 50 for i in range(40)]


def trace_turn(
    task_id: str = "t", turn: int = 0, prompt: list[int] | None = None, answer: list[int] | None = None
) -> TraceTurn:
    return TraceTurn(task_id, "part", turn, "edit", prompt or [*COPY, 60, 61], None, answer or COPY, [])


class Codec:
    """As much of a tokenizer as a replay needs where nothing is predicted."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def replay(turns: list[TraceTurn], speculation: Speculation, cost=lambda rows, context: 10.0 + rows) -> list:  # type: ignore[no-untyped-def]
    return list(replay_trace(turns, speculation, Codec(), cost, overhead_ms=0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("speculation", [Speculation("off"), Speculation("static", 4), Speculation("dynamic", 16)])
def test_a_replay_commits_exactly_the_answer(speculation: Speculation) -> None:
    [record] = replay([trace_turn()], speculation)
    assert list(record.token_ids) == COPY
    assert sum(step.num_tokens for step in record.steps) == len(COPY)
    assert all(step.num_tokens == step.num_accepted + 1 for step in record.steps[1:])
    assert record.turn_ms == pytest.approx(sum(10.0 + 1 + step.num_drafted + 0.5 for step in record.steps[1:]))
    assert (record.steps[-1].num_drafted > 0) == (speculation.mode != "off")


def test_copies_are_quicker_than_plain_decoding() -> None:
    plain, copied = (replay([trace_turn()], Speculation(mode)) for mode in ("off", "dynamic"))  # type: ignore[arg-type]
    assert copied[0].turn_ms < plain[0].turn_ms / 3
    assert measure.acceptance_rate(copied[0].steps) > 0.9
    assert measure.calibration_error(copied) is not None
    assert sum(measure.horizon_histogram(copied)) == len(copied[0].steps) - 1
    assert measure.calibration_error(plain) is None
    assert measure.horizon_histogram(plain) == [len(COPY) - 1]


def test_earlier_answers_are_known_within_a_task_only() -> None:
    prompts = [[60, 61, 62], [62, 61, 60]]
    same = replay([trace_turn("t", i, prompt) for i, prompt in enumerate(prompts)], Speculation())
    apart = replay([trace_turn(f"t{i}", 0, prompt) for i, prompt in enumerate(prompts)], Speculation())
    assert "corpus" in measure.rounds_by_source(same)
    assert "corpus" not in measure.rounds_by_source(apart)


def test_a_trace_of_the_engine_is_what_the_engine_says(tiny_checkpoint: Path, tmp_path: Path) -> None:
    turns = [
        Turn([{"role": "user", "content": text}], gold="gold", kind="prose", max_tokens=12) for text in ("abc", "def")
    ]
    task = Task("task", "part", turns)
    path = tmp_path / "trace.jsonl"
    with Engine(tiny_checkpoint, draft=None) as engine:
        for speculation in (None, Speculation("off")):
            write_trace(path, record_task(task, engine, speculation=speculation))
    recorded = read_trace(path)
    assert [each.turn for each in recorded] == [0, 1, 0, 1]
    for one, other in zip(recorded[:2], recorded[2:], strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.top) == len(one.token_ids)
        assert all(top[0][0] == token for top, token in zip(one.top, one.token_ids, strict=True))
    assert len(recorded[1].prompt_token_ids) > len(recorded[0].prompt_token_ids)  # the gold answer joined the history


@pytest.mark.parametrize("draft", ["trained_head", "sharp_target"])
def test_a_recorded_draft_model_drafts_as_the_engine_does(
    sharp_target: Path, draft: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What a replay makes of a recording is what the engine's own static drafting did, draft by draft."""
    task = Task("task", "part", [Turn([{"role": "user", "content": "abc"}], gold="gold", kind="prose", max_tokens=24)])
    speculation = Speculation("static", 3, drafters=("model",))
    path = tmp_path / "trace.jsonl"
    with Engine(sharp_target, draft=request.getfixturevalue(draft)) as engine:
        prompt = engine.tokenizer.encode(engine.render(task.turns[0].messages))
        real: list[tuple[int, int]] = []
        engine.core.listeners.append(lambda event: real.append((event.num_drafted, event.num_accepted)))
        output = engine.generate(prompt, SamplingParams(max_tokens=24), speculation=speculation)
        write_trace(path, record_task(task, engine, recorder=record_drafts(engine)))
    [turn] = read_trace(path)
    assert list(turn.token_ids) == list(output.token_ids)
    recorded = RecordedProposer(draft_ms=2.0)
    ladder = make_ladder(Codec(), recorded)  # type: ignore[arg-type]
    [record] = replay_trace([turn], speculation, Codec(), lambda *_: 10.0, ladder=ladder, recorded=recorded)  # type: ignore[arg-type]
    steps = record.steps[1:]
    assert [(step.num_drafted, step.num_accepted) for step in steps] == real[1 : 1 + len(steps)]
    assert sum(step.num_drafted for step in steps) > 0
    assert record.turn_ms == pytest.approx(sum(10.0 + 2.0 * step.num_drafted for step in steps))


def test_recording_needs_a_draft_model(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, draft=None) as engine, pytest.raises(InvalidParameterError, match="no draft model"):
        record_drafts(engine)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="record a trace first"):
        read_trace(tmp_path / "missing")
    (tmp_path / "bad").write_text('{"task_id": 1}\n')
    with pytest.raises(BenchmarkError, match="line 1 is not a recorded turn"):
        read_trace(tmp_path / "bad")


def test_rules() -> None:
    assert score.parse_rule("static:4") == Speculation("static", 4, min_acceptance=0.0)
    assert score.parse_rule("dynamic:16:0.9:suffix,model") == Speculation("dynamic", 16, ("suffix", "model"), 0.9)
    for text in ("dynamic:x", "bogus:4", "dynamic:4:2"):
        with pytest.raises(InvalidParameterError):
            score.parse_rule(text)


def test_pass_costs_from_measured_rows() -> None:
    cost = score.pass_cost("1=10,8=14,16=22")
    assert [cost(rows, 0) for rows in (1, 8, 12, 16)] == [10.0, 14.0, 18.0, 22.0]
    assert cost(24, 0) == pytest.approx(30.0)
    assert cost(1, 4096) > cost(1, 0)
    assert score.pass_cost("")(8, 0) > score.pass_cost("")(1, 0)
    for text in ("8=14", "x", "1=10"):
        with pytest.raises(InvalidParameterError):
            score.pass_cost(text)


def test_rank_prints_a_row_per_rule(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [trace_turn(), trace_turn(turn=1)])
    arguments = ["rank", str(path), "--model", str(tiny_checkpoint), "--rules", "static:4 dynamic:16", "--positions"]
    result = CliRunner().invoke(score.app, [*arguments, "--calibration"])
    assert result.exit_code == 0, result.output
    for expected in ("static:4", "dynamic:16", "acceptance by position", "suffix"):
        assert expected in result.output


def test_a_fresh_ladder_has_all_lookups() -> None:
    assert make_ladder(Codec()).sources == ["prediction", "suffix", "corpus"]  # type: ignore[arg-type]
