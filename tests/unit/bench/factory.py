"""Synthetic turns with known answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.bench.machine import Machine, Versions
from paceline.bench.measure import KVLayout
from paceline.bench.records import StepRecord, TextKind, TurnRecord
from paceline.bench.results import RunInfo

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
BYTES_PER_SLOT = 1024
KINDS: tuple[TextKind, ...] = ("prose", "new code", "edit")
ARMS = ("autoregressive-contiguous", "autoregressive", "static-8", "dynamic")


def step(ms: float = 10.0, num_tokens: int = 1, **options: Any) -> StepRecord:
    """One step; a plain token of 10 ms if nothing is said."""
    return StepRecord(ms, num_tokens, **options)


def drafted(num_drafted: int, num_accepted: int, ms: float = 10.0, **options: Any) -> StepRecord:
    """One round that yields the accepted drafts and one more token."""
    options = {"horizon": num_drafted, "source": "suffix", **options}
    return StepRecord(ms, num_accepted + 1, num_drafted, num_accepted, **options)


def turn(steps: Sequence[StepRecord] = (), **options: Any) -> TurnRecord:
    """One turn of these steps; its token ids and its time follow from them."""
    defaults: dict[str, Any] = {
        "arm": "dynamic",
        "task_id": "task-0",
        "part": "part",
        "turn": 0,
        "kind": "edit",
        "is_cold": True,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 0,
        "token_ids": tuple(range(sum(each.num_tokens for each in steps))),
        "turn_ms": sum(each.ms for each in steps),
    }
    return TurnRecord(steps=tuple(steps), **{**defaults, **options})


def noisy_arm(
    arm: str, seed: int, *, token_ms: float = 10.0, num_tasks: int = 20, num_tokens: int = 50
) -> list[TurnRecord]:
    """Two runs of it with different seeds differ by noise alone: 20 % between tasks (shared), 10 % between tokens."""
    generator = np.random.default_rng(seed)
    difficulty = np.random.default_rng(0).lognormal(sigma=0.2, size=num_tasks)
    return [
        turn(
            [step(ms=float(token_ms * each * generator.lognormal(sigma=0.1))) for _ in range(num_tokens)],
            arm=arm,
            task_id=f"task-{task}",
        )
        for task, each in enumerate(difficulty)
    ]


def run_info(**options: Any) -> RunInfo:
    """A machine that never was, a budget of eight full contexts, paged and contiguous layouts."""
    machine = Machine(
        processor="Synthetic 9000",
        num_cores=4,
        num_usable_cores=2,
        instructions=["avx2", "avx512_vnni"],
        memory_gib=16.0,
        system="Linux-0",
        load=0.5,
        num_threads=2,
        versions=Versions("3.11.0", {"paceline": "0.1.0", "torch": "2.9.0"}),
        measured_at="2025-01-01T00:00:00+00:00",
    )
    layouts = {
        arm: KVLayout(MAX_MODEL_LEN if arm.endswith("contiguous") else BLOCK_SIZE, BYTES_PER_SLOT) for arm in ARMS
    }
    defaults: dict[str, Any] = {
        "machine": machine,
        "model": "synthetic-1m",
        "draft": None,
        "suite": "synthetic",
        "kv_budget_bytes": 8 * MAX_MODEL_LEN * BYTES_PER_SLOT,
        "layouts": layouts,
    }
    return RunInfo(**{**defaults, **options})


def agent_run(
    arms: Sequence[str] = ARMS, *, num_tasks: int = 8, num_turns: int = 5, tokens_per_turn: int = 80
) -> list[TurnRecord]:
    """A benchmark as it might come out, for the report: cold first turns, growing contexts, drafts by kind of text."""
    accept: Mapping[str, float] = {"prose": 0.45, "new code": 0.65, "edit": 0.93}
    records = []
    for index, arm in enumerate(arms):
        generator = np.random.default_rng(index)
        for task in range(num_tasks):
            context, horizon = 400 + 40 * task, 4.0
            for number in range(num_turns):
                kind = KINDS[(task + number) % 3]
                is_computed_anew = number == 0 or arm.endswith("contiguous")
                steps: list[StepRecord] = []
                num_tokens = 0
                while num_tokens < tokens_per_turn:
                    length = _length(arm, horizon) if steps else 0
                    hits = [bool(generator.random() < accept[kind]) for _ in range(length)]
                    accepted = hits.index(False) if False in hits else length
                    horizon += 0.25 * (1.5 * (accepted + (accepted == length)) + 1 - horizon)
                    horizon = min(16.0, horizon)
                    num_tokens += accepted + 1
                    filled = context + num_tokens
                    block = MAX_MODEL_LEN if arm.endswith("contiguous") else BLOCK_SIZE
                    first_ms = (0.5 * context if is_computed_anew else 40.0) if not steps else 0.0
                    forward = 9.0 + 0.35 * length
                    steps.append(
                        step(
                            ms=float(first_ms + (forward + 0.05 * length + 0.6) * generator.lognormal(sigma=0.08)),
                            num_tokens=accepted + 1,
                            num_drafted=length,
                            num_accepted=accepted,
                            horizon=length,
                            source="suffix" if length else "none",
                            filled_slots=filled,
                            reserved_slots=-(-(filled + length + 1) // block) * block,
                            draft_ms=0.05 * length,
                            forward_ms=first_ms + forward,
                        )
                    )
                records.append(
                    turn(
                        steps,
                        arm=arm,
                        task_id=f"task-{task}",
                        turn=number,
                        kind=kind,
                        is_cold=number == 0,
                        num_prompt_tokens=context,
                        token_ids=tuple(range(num_tokens)),
                        peak_rss_mib=600.0 + context / 10,
                    )
                )
                context += 150 + num_tokens
    return records


def _length(arm: str, horizon: float) -> int:
    if arm.startswith("autoregressive"):
        return 0
    return int(arm.removeprefix("static-")) if arm.startswith("static-") else max(1, round(horizon))
