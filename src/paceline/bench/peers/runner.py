"""Serves the turns of one peer arm through its worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.arms import Arm
from paceline.bench.drive import Runner
from paceline.bench.peers.process import WorkerProcess
from paceline.bench.records import Message, StepRecord, Task, TurnRecord
from paceline.errors import BenchmarkError
from paceline.loader.chat import ChatTemplate
from paceline.loader.tokenizer import Tokenizer

LOAD_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 600.0
_WARM_UP_TEXT, _WARM_UP_TOKENS = "def main():\n", 8


@dataclass(frozen=True, slots=True)
class Prompting:
    """How messages become token ids, exactly as for Paceline's own arms, and how ids become text."""

    tokenizer: Tokenizer
    template: ChatTemplate
    context_length: int


class PeerRunner:
    """Implements ``Runner`` for the one arm its worker has loaded.

    Attributes:
        arm: that arm.
        extra: what every record says about the peer: its weights and its version.

    Raises:
        BenchmarkError: from the constructor if the worker cannot load, from ``begin`` and ``run`` if it dies, hangs
            or fails; the runner is of no use then.
    """

    def __init__(
        self,
        arm: Arm,
        worker: WorkerProcess,
        prompting: Prompting,
        *,
        options: Mapping[str, Any],
        turn_timeout_s: float = TURN_TIMEOUT_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        self.arm = arm
        self._worker, self._prompting = worker, prompting
        self._turn_timeout_s, self._load_timeout_s = turn_timeout_s, load_timeout_s
        loaded = worker.request("load", timeout_s=load_timeout_s, **options)
        self.extra = {"weights": loaded.get("weights"), "peer_version": loaded.get("version")}
        self._generate(prompting.tokenizer.encode(_WARM_UP_TEXT), _WARM_UP_TOKENS, [])

    def begin(self, arm: Arm) -> None:
        """See :class:`paceline.bench.drive.Runner`."""
        self._worker.request("reset", timeout_s=self._load_timeout_s)

    def run(self, arm: Arm, task: Task, number: int, messages: Sequence[Message]) -> tuple[TurnRecord, str]:
        """See :class:`paceline.bench.drive.Runner`. Times are the worker's own, from the arrival of the request."""
        turn = task.turns[number]
        tokenizer = self._prompting.tokenizer
        prompt = tokenizer.encode(self._prompting.template.render(messages))
        room = self._prompting.context_length - len(prompt)
        if room < 1:
            raise BenchmarkError(f"{arm.name}: a prompt of {len(prompt)} tokens leaves no room in its context")
        answer = self._generate(prompt, min(turn.max_tokens, room), sorted(tokenizer.eos_token_ids))
        token_ids, steps = answer["token_ids"], _steps(answer["steps"])
        record = TurnRecord(
            arm=arm.name,
            task_id=task.task_id,
            part=task.part,
            turn=number,
            kind=turn.kind,
            is_cold=number == 0,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=answer["num_cached_tokens"],
            token_ids=token_ids,
            turn_ms=sum(step.ms for step in steps),
            steps=steps,
            peak_rss_mib=answer["peak_rss_mib"],
            extra=self.extra,
        )
        return record, tokenizer.decode(token_ids)

    def close(self) -> None:
        """End the worker; closing twice is allowed."""
        self._worker.close()

    def _generate(self, token_ids: Sequence[int], max_tokens: int, end_token_ids: Sequence[int]) -> dict[str, Any]:
        answer = self._worker.request(
            "generate",
            timeout_s=self._turn_timeout_s,
            token_ids=list(token_ids),
            max_tokens=max_tokens,
            end_token_ids=list(end_token_ids),
        )
        if not answer.get("token_ids") or sum(count for _, count in answer["steps"]) != len(answer["token_ids"]):
            self.close()
            raise BenchmarkError(f"{self.arm.name} answered a turn without tokens, or with steps that do not add up")
        return answer


class RunnerByArm:
    """A ``Runner`` that hands each arm to its own runner, and all others to ``default``."""

    def __init__(self, default: Runner, by_name: Mapping[str, Runner]) -> None:
        self._default, self._by_name = default, by_name

    def begin(self, arm: Arm) -> None:
        """See :class:`paceline.bench.drive.Runner`."""
        self._by_name.get(arm.name, self._default).begin(arm)

    def run(self, arm: Arm, task: Task, number: int, messages: Sequence[Message]) -> tuple[TurnRecord, str]:
        """See :class:`paceline.bench.drive.Runner`."""
        return self._by_name.get(arm.name, self._default).run(arm, task, number, messages)


def _steps(steps: Sequence[tuple[float, int]]) -> list[StepRecord]:
    times = [0.0, *(at for at, _ in steps)]
    return [StepRecord(ms=at - before, num_tokens=count) for before, (at, count) in zip(times[:-1], steps, strict=True)]
