"""The target's own answers with its probabilities, generated in batches by the engine and kept on disk.

They come from the engine that will verify the draft, quantised weights included: acceptance is agreement with exactly
those numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.engine.engine import Engine
from paceline.engine.output import Output
from paceline.request import SamplingParams, Speculation
from paceline.train.prompts import Prompt

NUM_TOP = 16
MAX_ANSWER_TOKENS = 192
MAX_PROMPT_TOKENS = 1600
# Every third answer is sampled, since drafts are also asked to follow texts that are not the likeliest.
_SAMPLED_EVERY, _TEMPERATURE = 3, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answer. ``top_ids`` and ``top_logprobs``: [num_answer_tokens, NUM_TOP], likeliest first, id -1 if fewer."""

    package: str
    kind: str
    prompt_ids: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float16]


class AnswerStore:
    """Answers in files of ``shard_size`` prompts; those already there are not asked for again.

    ``folder`` belongs to one target; a shard's name is a hash of its prompts, so that runs which share prompts share
    answers.
    """

    def __init__(self, folder: Path, *, shard_size: int = 64) -> None:
        self._folder = folder
        self._shard_size = shard_size

    def missing(self, prompts: Sequence[Prompt]) -> list[tuple[Path, Sequence[Prompt]]]:
        """Shards that are still to be generated."""
        return [(path, part) for path, part in self._shards(prompts) if not path.exists()]

    def generate(self, prompts: Sequence[Prompt], engine: Engine) -> Iterator[int]:
        """Fill in what is missing; yields the number of answers done after each shard, those found included."""
        self._folder.mkdir(parents=True, exist_ok=True)
        done = 0
        for path, part in self._shards(prompts):
            if not path.exists():
                _write(path, [_answer(prompt, *item) for prompt, item in zip(part, _ask(engine, part), strict=True)])
            done += len(part)
            yield done

    def read(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """The answers to ``prompts`` that are there, in their order; empty ones are left out."""
        for path, _ in self._shards(prompts):
            if path.exists():
                yield from _read(path)

    def _shards(self, prompts: Sequence[Prompt]) -> list[tuple[Path, Sequence[Prompt]]]:
        parts = [prompts[i : i + self._shard_size] for i in range(0, len(prompts), self._shard_size)]
        return [(self._folder / f"{_key(part)}.npz", part) for part in parts]


def _key(prompts: Sequence[Prompt]) -> str:
    content = json.dumps([[item.package, item.kind, item.content] for item in prompts])
    return hashlib.sha256(f"{NUM_TOP} {MAX_ANSWER_TOKENS} {content}".encode()).hexdigest()[:20]


def _ask(engine: Engine, prompts: Sequence[Prompt]) -> list[tuple[list[int], Output]]:
    """Run the prompts side by side, as many at once as the engine's scheduler takes."""
    inputs, request_ids = [], []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt.content, str):
            token_ids = engine.tokenizer.encode(prompt.content, add_special_tokens=True)
        else:
            token_ids = engine.tokenizer.encode(engine.render(list(prompt.content)))
        limit = min(MAX_PROMPT_TOKENS, engine.info.max_model_len // 2)
        token_ids = token_ids[-limit:]
        is_sampled = number % _SAMPLED_EVERY == _SAMPLED_EVERY - 1
        params = SamplingParams(
            temperature=_TEMPERATURE if is_sampled else 0.0,
            seed=number if is_sampled else None,
            max_tokens=min(MAX_ANSWER_TOKENS, limit),
            logprobs=NUM_TOP,
        )
        inputs.append(token_ids)
        request_ids.append(engine.submit(token_ids, params, speculation=Speculation(mode="off")))
    outputs: dict[str, Output] = {}
    while len(outputs) < len(request_ids):
        engine.step()
        for request_id in request_ids:
            if request_id not in outputs:
                for delta in engine.take(request_id):
                    if delta.output is not None:
                        outputs[request_id] = delta.output
    return [(token_ids, outputs[request_id]) for token_ids, request_id in zip(inputs, request_ids, strict=True)]


def _answer(prompt: Prompt, prompt_ids: Sequence[int], output: Output) -> Answer:
    rows = output.logprobs or ()
    assert len(rows) == len(output.token_ids)
    top_ids = np.full((len(rows), NUM_TOP), -1, dtype=np.int32)
    top_logprobs = np.full((len(rows), NUM_TOP), -np.inf, dtype=np.float16)
    for i, row in enumerate(rows):
        top_ids[i, : len(row.top)] = list(row.top)
        top_logprobs[i, : len(row.top)] = list(row.top.values())
    return Answer(
        prompt.package,
        prompt.kind,
        np.array(prompt_ids, dtype=np.int32),
        np.array(output.token_ids, dtype=np.int32),
        top_ids,
        top_logprobs,
    )


def _write(path: Path, answers: Sequence[Answer]) -> None:
    """Write a shard whole or not at all."""
    part = path.with_name(f"{path.stem}.part.npz")
    np.savez_compressed(
        part,
        packages=np.array([item.package for item in answers]),
        kinds=np.array([item.kind for item in answers]),
        prompt_sizes=np.array([len(item.prompt_ids) for item in answers]),
        sizes=np.array([len(item.token_ids) for item in answers]),
        prompt_ids=np.concatenate([item.prompt_ids for item in answers]),
        token_ids=np.concatenate([item.token_ids for item in answers]),
        top_ids=np.concatenate([item.top_ids for item in answers]),
        top_logprobs=np.concatenate([item.top_logprobs for item in answers]),
    )
    part.replace(path)


def _read(path: Path) -> Iterator[Answer]:
    with np.load(path, allow_pickle=False) as shard:
        arrays = {name: shard[name] for name in shard.files}
    start = prompt_start = 0
    for i, size in enumerate(arrays["sizes"].tolist()):
        prompt_size = int(arrays["prompt_sizes"][i])
        rows = slice(start, start + size)
        if size:
            yield Answer(
                str(arrays["packages"][i]),
                str(arrays["kinds"][i]),
                arrays["prompt_ids"][prompt_start : prompt_start + prompt_size],
                arrays["token_ids"][rows],
                arrays["top_ids"][rows],
                arrays["top_logprobs"][rows],
            )
        start, prompt_start = start + size, prompt_start + prompt_size
