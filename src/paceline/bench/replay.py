"""Replay: the ladder drafts against answers that are already known, without running the target.

The answers are the suite's gold edits (a stand-in for a strong target; results carry the label ``gold-replay`` and no
times), or a recorded trace of the real target (:mod:`paceline.bench.trace`), where a model of the costs says how long
each step would have taken. Rules and their constants are ranked here in seconds, then confirmed in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.bench.arms import Arm
from paceline.bench.recorded import RecordedProposer
from paceline.bench.records import Message, StepRecord, Task, Turn, TurnRecord
from paceline.records import Verdict
from paceline.request import Request, SamplingParams, Speculation
from paceline.spec.ladder import Ladder
from paceline.spec.prediction import PredictionLookup
from paceline.spec.proposer import Lookup
from paceline.spec.suffix import CorpusLookup, SuffixLookup

if TYPE_CHECKING:
    from paceline.bench.trace import TraceTurn
    from paceline.loader.chat import ChatTemplate
    from paceline.loader.tokenizer import Tokenizer

# Milliseconds of a verifying pass by rows and context.
PassCost = Callable[[int, int], float]

_ANSWER_TOKENS = 2**18


def make_ladder(tokenizer: Tokenizer, recorded: RecordedProposer | None = None) -> Ladder:
    """All lookups, as an engine has them, and nothing learnt yet; with the recorded draft model if one is given."""
    lookups: list[Lookup] = [PredictionLookup(tokenizer), SuffixLookup(), CorpusLookup(_ANSWER_TOKENS)]
    return Ladder(lookups, [recorded], clock=recorded.clock) if recorded is not None else Ladder(lookups)


def replay_task(task: Task, arm: Arm, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[TurnRecord]:
    """Gold replay: one record per turn; its steps carry counts and no times."""
    history: list[Message] = []
    ladder = make_ladder(tokenizer)
    for number, turn in enumerate(task.turns):
        history += turn.messages
        prompt = tokenizer.encode(template.render(history))
        gold = tokenizer.encode(turn.gold)[: turn.max_tokens]
        yield TurnRecord(
            arm=arm.name,
            task_id=task.task_id,
            part=task.part,
            turn=number,
            kind=turn.kind,
            is_cold=number == 0,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=0,
            token_ids=gold,
            turn_ms=0.0,
            steps=list(_gold_steps(turn, task.task_id, arm.speculation, prompt, gold, tokenizer, ladder)),
            extra={"mode": "gold-replay"},
        )
        history.append({"role": "assistant", "content": turn.gold})


def replay_trace(
    turns: Sequence[TraceTurn],
    speculation: Speculation,
    tokenizer: Tokenizer,
    pass_cost: PassCost,
    *,
    overhead_ms: float = 0.0,
    ladder: Ladder | None = None,
    recorded: RecordedProposer | None = None,
) -> Iterator[TurnRecord]:
    """A trace with modelled times; earlier answers of a task are known to its later turns, as in the benchmark.

    Args:
        pass_cost: what a pass of so many rows after so many tokens takes.
        overhead_ms: scheduling and looking up, per step.
        ladder: what drafts and learns; by default all lookups, fresh.
        recorded: the draft model of that ladder, if it has one.
    """
    ladder = ladder if ladder is not None else make_ladder(tokenizer)
    task_id = None
    for turn in turns:
        if turn.task_id != task_id:
            task_id = turn.task_id
            ladder.forget_answers()
        if recorded is not None:
            recorded.drafts = turn.drafts
        prediction = tokenizer.encode(turn.prediction) if turn.prediction else ()
        request = _request(turn.prompt_token_ids, turn.token_ids, speculation, turn.task_id, prediction)
        steps = list(replay_answer(request, turn.token_ids, ladder, pass_cost, overhead_ms, recorded))
        yield TurnRecord(
            arm=speculation.mode,
            task_id=turn.task_id,
            part=turn.part,
            turn=turn.turn,
            kind=turn.kind,
            is_cold=turn.turn == 0,
            num_prompt_tokens=len(turn.prompt_token_ids),
            num_cached_tokens=0,
            token_ids=turn.token_ids,
            turn_ms=sum(step.ms for step in steps),
            steps=steps,
            extra={"mode": "trace-replay"},
        )


def replay_answer(
    request: Request,
    answer: Sequence[int],
    ladder: Ladder,
    pass_cost: PassCost | None = None,
    overhead_ms: float = 0.0,
    recorded: RecordedProposer | None = None,
) -> Iterator[StepRecord]:
    """Draft, verify against ``answer``, commit, until it is complete; the prompt's pass yields its first token."""
    if answer:
        request.token_ids.append(answer[0])
        yield StepRecord(ms=0.0, num_tokens=1)
    while request.num_output_tokens < len(answer):
        remaining = answer[request.num_output_tokens :]
        context = request.num_tokens
        drafted_before = recorded.clock() if recorded is not None else 0.0
        ladder.plan([request])
        length = min(ladder.horizon(request), len(remaining) - 1)
        [draft] = ladder.propose([request], [length])
        draft_ms = overhead_ms + ((recorded.clock() - drafted_before) * 1e3 if recorded is not None else 0.0)
        num_accepted = 0
        while num_accepted < len(draft.token_ids) and draft.token_ids[num_accepted] == remaining[num_accepted]:
            num_accepted += 1
        verdict = Verdict(remaining[: num_accepted + 1], len(draft.token_ids), num_accepted)
        request.token_ids += verdict.token_ids
        ladder.observe(request, verdict)
        num_tokens = len(verdict.token_ids)
        forward_ms = step_ms = 0.0
        if pass_cost is not None:
            forward_ms = pass_cost(1 + verdict.num_drafted, context)
            step_ms = forward_ms + draft_ms
            ladder.record_step([request], num_tokens, verdict.num_drafted, draft_ms=draft_ms, step_ms=step_ms)
        yield StepRecord(
            ms=step_ms,
            num_tokens=num_tokens,
            num_drafted=verdict.num_drafted,
            num_accepted=num_accepted,
            horizon=length,
            source=draft.source,
            draft_ms=draft_ms if verdict.num_drafted else 0.0,
            forward_ms=forward_ms,
            expected_acceptances=tuple(draft.acceptances),
        )
    ladder.release(request)


def _gold_steps(
    turn: Turn,
    task_id: str,
    speculation: Speculation,
    prompt: Sequence[int],
    gold: Sequence[int],
    tokenizer: Tokenizer,
    ladder: Ladder,
) -> Iterator[StepRecord]:
    prediction = tokenizer.encode(turn.prediction) if turn.prediction else ()
    return replay_answer(_request(prompt, gold, speculation, task_id, prediction), gold, ladder)


def _request(
    prompt: Sequence[int], answer: Sequence[int], speculation: Speculation, session: str, prediction: Sequence[int]
) -> Request:
    return Request(
        request_id="replay",
        prompt_token_ids=prompt,
        params=SamplingParams(),
        speculation=speculation,
        max_total_tokens=len(prompt) + len(answer),
        prediction_token_ids=prediction,
        session_id=session,
    )
