"""Files and answers to the rows that a draft is trained and judged on."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from paceline.loader.chat import ChatTemplate
from paceline.loader.load import Checkpoint
from paceline.loader.tokenizer import Tokenizer
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.corpus import SourceFile
from paceline.train.dataset import RowSet, kinds_of, pack
from paceline.train.distill import Answer
from paceline.train.encoding import Example, Teacher, place
from paceline.train.examples import ExampleMaker
from paceline.train.recipe import Recipe
from paceline.train.syntax import roles_of_answer
from paceline.train.vocabulary import choose_vocabulary, coverage

_PROMPT_WEIGHT = 0.5  # it is not what will be drafted, but more like it than source files are


def make_rows(
    files: Iterable[SourceFile],
    answers: Iterable[Answer],
    held_out: Iterable[Answer],
    target: Checkpoint,
    chat: ChatTemplate | None,
    recipe: Recipe,
    *,
    vocabulary: DraftVocabulary | None,
) -> tuple[RowSet, RowSet, dict[str, Any]]:
    """Rows to train on, held-out rows (answers alone), and numbers for the provenance.

    Without a ``vocabulary`` one is chosen from the answers and the files.
    """
    tokenizer = target.tokenizer
    maker = ExampleMaker(tokenizer, chat, recipe.row_tokens, tuple(recipe.syntax), recipe.seed)
    examples = [example for file in files for example in maker.examples(file)]
    # A head learns from every token, by the target's states.
    prompt_weight = _PROMPT_WEIGHT if recipe.kind == "head" else 0.0
    taught = [taught_example(answer, tokenizer, recipe, prompt_weight) for answer in answers]
    unseen = [taught_example(answer, tokenizer, recipe) for answer in held_out]
    written = [
        example.token_ids[-len(example.teacher.token_ids) :] for example in taught if example.teacher is not None
    ]
    sources = [example.token_ids for example in examples if example.kind == "window"]
    if recipe.kind == "head" and taught:
        examples = _as_many_tokens(examples, sum(len(example.token_ids) for example in taught), recipe.seed)
    vocabulary = vocabulary or choose_vocabulary(tokenizer, recipe.shape.vocab_size, answers=written, sources=sources)
    facts = {
        "examples": kinds_of([*examples, *taught]),
        "vocabulary": {
            "tokens": vocabulary.num_tokens,
            "coverage_of_answers": _coverage(vocabulary, written),
            "coverage_of_sources": _coverage(vocabulary, sources),
        },
    }

    def packed(items: list[Example]) -> RowSet:
        vocab_size = target.config.vocab_size
        return pack(items, vocabulary, vocab_size=vocab_size, row_tokens=recipe.row_tokens, seed=recipe.seed)

    rows, held_out_rows = packed(examples + taught), packed(unseen)
    return rows, held_out_rows, {**facts, "rows": rows.describe(), "held_out": held_out_rows.describe()}


def taught_example(answer: Answer, tokenizer: Tokenizer, recipe: Recipe, prompt_weight: float = 0.0) -> Example:
    """An answer after as much of its prompt as fits a row; a token of the prompt counts ``prompt_weight``."""
    size, prompt_size = len(answer.token_ids), len(answer.prompt_ids)
    token_ids = answer.token_ids.tolist()
    data = b"".join(b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token) for token in token_ids)
    text = data.decode(errors="replace")
    # Where the answer breaks off within a character the offsets would not fit: prose throughout.
    roles = roles_of_answer(text) if len(text.encode()) == len(data) else np.zeros(len(data), np.uint8)
    placed = place(token_ids, data, tokenizer, roles)
    own = placed.role_weights() if "roles" in recipe.syntax else np.ones(size, np.float32)
    first = max(0, prompt_size + size - recipe.row_tokens)
    num_prompt = max(0, prompt_size - first)
    kept = slice(max(0, first - prompt_size), None)
    return Example(
        [*answer.prompt_ids[first:].tolist(), *token_ids[kept]],
        np.concatenate([np.full(num_prompt, prompt_weight, np.float32), own[kept]]),
        np.concatenate([np.zeros(num_prompt, np.uint8), placed.roles[kept]]),
        answer.package,
        f"answer: {answer.kind}",
        Teacher(answer.top_ids[kept], answer.top_logprobs[kept]),
    )


def _as_many_tokens(examples: list[Example], num_tokens: int, seed: int) -> list[Example]:
    """Some of the examples, about as long together as the answers with their prompts.

    A head reads states that cost as much as its training: source code must not crowd out what it will be asked for.
    """
    chosen: list[Example] = []
    for index in random.Random(seed).sample(range(len(examples)), len(examples)):
        if num_tokens <= 0:
            break
        chosen.append(examples[index])
        num_tokens -= len(examples[index].token_ids)
    return chosen


def _coverage(vocabulary: DraftVocabulary, texts: Iterable[Iterable[int]]) -> float:
    token_ids = [token_id for text in texts for token_id in text]
    return round(coverage(vocabulary, token_ids), 5)
