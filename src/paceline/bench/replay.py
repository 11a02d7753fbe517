"""Gold replay: proposers scored against the gold answers, without running the target.

A stand-in for a strong target, whose answers would be close to the gold edits: how many tokens would a pass have
yielded? It says nothing about time, and results carry the label ``gold-replay``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.bench.arms import Arm
from paceline.bench.records import Message, StepRecord, Task, Turn, TurnRecord
from paceline.records import Verdict
from paceline.request import Request, SamplingParams
from paceline.spec.chain import ProposerChain
from paceline.spec.horizon import make_horizon
from paceline.spec.prediction import PredictionProposer
from paceline.spec.suffix import SuffixProposer

if TYPE_CHECKING:
    from paceline.loader.chat import ChatTemplate
    from paceline.loader.tokenizer import Tokenizer


def replay_task(task: Task, arm: Arm, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[TurnRecord]:
    """One record per turn; its steps carry counts and no times."""
    history: list[Message] = []
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
            steps=list(_replay(turn, arm, prompt, gold, tokenizer)),
            extra={"mode": "gold-replay"},
        )
        history.append({"role": "assistant", "content": turn.gold})


def _replay(
    turn: Turn, arm: Arm, prompt: Sequence[int], gold: Sequence[int], tokenizer: Tokenizer
) -> Iterator[StepRecord]:
    request = Request(
        request_id="replay",
        prompt_token_ids=prompt,
        params=SamplingParams(),
        speculation=arm.speculation,
        max_total_tokens=len(prompt) + len(gold),
        prediction_token_ids=tokenizer.encode(turn.prediction) if turn.prediction else (),
    )
    proposer = ProposerChain([PredictionProposer(), SuffixProposer()])
    horizon = make_horizon(arm.speculation)
    if gold:
        request.token_ids.append(gold[0])  # the prompt's own pass yields the first token
        yield StepRecord(ms=0.0, num_tokens=1)
    while request.num_output_tokens < len(gold):
        remaining = gold[request.num_output_tokens :]
        length = min(horizon.choose(), len(remaining) - 1)
        [draft] = proposer.propose([request], [length])
        num_accepted = 0
        for drafted, wanted in zip(draft.token_ids, remaining, strict=False):
            if drafted != wanted:
                break
            num_accepted += 1
        verdict = Verdict(remaining[: num_accepted + 1], len(draft.token_ids), num_accepted)
        request.token_ids += verdict.token_ids
        horizon.observe(verdict.num_drafted, verdict.num_accepted)
        proposer.observe(request, verdict)
        yield StepRecord(
            ms=0.0,
            num_tokens=len(verdict.token_ids),
            num_drafted=verdict.num_drafted,
            num_accepted=num_accepted,
            horizon=length,
            source=draft.source,
        )
