"""One training run from the corpus to the exported draft, each stage resumable where it was left."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.backends.quantized import as_tensor
from paceline.engine.engine import Engine
from paceline.errors import ChatTemplateError, DraftMismatchError, TrainingError
from paceline.loader.chat import ChatTemplate
from paceline.loader.draft import DRAFT_FILE, EMBEDDING, vocabulary_sha256
from paceline.loader.load import Checkpoint, load_checkpoint
from paceline.loader.safetensors import read_json
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.corpus import SourceFile, installed_packages, standard_library
from paceline.train.dataset import RowSet
from paceline.train.distill import AnswerStore
from paceline.train.evaluation import Acceptance, evaluate
from paceline.train.export import draft_config, export_draft
from paceline.train.head_start import fit_to_states
from paceline.train.loop import Progress, Trainer, has_fast_bf16
from paceline.train.near_duplicates import HeldOutTexts, NearDuplicates
from paceline.train.network import (
    DraftNetwork,
    head_rows,
    initialise_from_embedding,
    initialise_from_target,
    last_layer,
)
from paceline.train.prompts import Prompt, make_prompts
from paceline.train.provenance import environment, files_sha256, packages_and_licences
from paceline.train.recipe import DraftShape, Recipe
from paceline.train.repository import tracked_files
from paceline.train.rows import make_rows
from paceline.train.states import TargetStates

_BYTES_PER_TOKEN = 3.3  # of source code, about
_HELD_OUT_EVERY = 10  # packages; for a repository, files
_MIN_PROMPTS_PER_FILE = 3
_MIN_HELD_OUT = 16


@dataclass(frozen=True, slots=True)
class Sources:
    """Where code comes from besides what the recipe names.

    ``excluded`` are distributions left out whole; ``benchmarks`` are texts nothing of which may occur in the corpus;
    ``repository`` is a git working tree; ``start`` is a draft to go on from.
    """

    repository: Path | None = None
    excluded: Sequence[str] = ()
    benchmarks: HeldOutTexts | None = None
    start: Path | None = None


class TrainingRun:
    """The stages in their order: `read_files`, `ask_target`, `build_rows`, `train`, `export`.

    ``work`` keeps rows and checkpoint of this run; ``answers`` keeps the target's answers, for all runs.

    Raises:
        ModelNotFoundError, ModelFormatError: the target or the draft to start from cannot be loaded.
        DraftMismatchError: the draft to start from was trained for another target.
    """

    def __init__(
        self, model: Path, recipe: Recipe, sources: Sources, *, work: Path, answers: Path, device: torch.device
    ) -> None:
        self._sources, self._work, self._device = sources, work, device
        # Quantised where the file is: the embedding is then what the engine computes with.
        self._target = load_checkpoint(model, dtype=torch.float32, keep_quantized=True)
        table = as_tensor(self._target.weights[EMBEDDING], torch.float32)
        self._table = table.to(torch.bfloat16 if has_fast_bf16(device) else torch.float32)
        self._last_layer = last_layer(self._target) if recipe.kind == "head" else {}
        self._target.weights.clear()
        self._store = AnswerStore(answers / f"{self._target.name}-{_fingerprint(table)}")
        self._start_vocabulary: DraftVocabulary | None = None
        if recipe.kind == "head":
            shape = DraftShape.of_target(self._target.config, recipe.shape.vocab_size, recipe.shape.window)
            recipe = replace(recipe, shape=shape)
        if sources.start is not None:
            shape, self._start_vocabulary = _read_start(sources.start, self._target, recipe)
            recipe = replace(recipe, shape=shape)
        self.recipe = recipe
        self._files: list[SourceFile] = []
        self._held_out_files: list[SourceFile] = []
        self._prompts: list[Prompt] = []
        self._held_out_prompts: list[Prompt] = []
        self._rows: RowSet | None = None
        self._held_out: RowSet | None = None
        self._trainer: Trainer | None = None
        self._facts: dict[str, Any] = {}

    def read_files(self) -> dict[str, int]:
        """Collect the corpus, without copies and benchmarks, and split it by package; counts for display."""
        dropped = {"copies": 0, "in benchmarks": 0}
        budget = self.recipe.corpus_tokens * _BYTES_PER_TOKEN
        seen = NearDuplicates()
        for file in self._candidates():
            is_own = file.package.startswith("repository.")
            if budget <= 0 and not is_own:
                break
            if self._sources.benchmarks is not None and self._sources.benchmarks.contains_part_of(file.text):
                dropped["in benchmarks"] += 1
                continue
            if not seen.is_new(file.text):
                dropped["copies"] += 1
                continue
            budget -= 0 if is_own else len(file.text)
            key = f"{file.package}/{file.path}" if is_own else file.package
            (self._held_out_files if _is_held_out(key) else self._files).append(file)
        if not self._files:
            raise TrainingError("no source files to learn from; name --data or --repo")
        count = self.recipe.num_answers
        self._prompts = self._questions(self._files, count)
        self._held_out_prompts = self._questions(
            self._held_out_files or self._files[-1:], max(_MIN_HELD_OUT, count // 10) if count else 0
        )
        self._facts = {
            "files": len(self._files),
            "files_sha256": files_sha256(self._files),
            "left_out": dropped,
            "licences": packages_and_licences(self._files),
            "held_out_packages": sorted({file.package for file in self._held_out_files}),
        }
        return {"files": len(self._files), "held out": len(self._held_out_files), **dropped}

    @property
    def num_questions(self) -> int:
        """How many answers the target owes, those already there included."""
        return len(self._prompts) + len(self._held_out_prompts)

    def ask_target(self, make_engine: Callable[[], Engine]) -> Iterator[int]:
        """Have the target answer what it has not answered yet; yields how many answers are there."""
        groups = (self._held_out_prompts, self._prompts)
        if not any(self._store.missing(prompts) for prompts in groups):
            return
        done = 0
        with make_engine() as engine:
            for prompts in groups:
                for count in self._store.generate(prompts, engine):
                    yield done + count
                done += len(prompts)

    def build_rows(self) -> dict[str, Any]:
        """Make examples and pack them, unless that was done for the same data before; a description."""
        key = self._data_key()
        marker = self._work / "rows.json"
        if marker.is_file() and read_json(marker).get("key") == key:
            self._rows, self._held_out = RowSet.load(self._work / "rows"), RowSet.load(self._work / "held-out")
        if self._rows is None or self._held_out is None:
            marker.unlink(missing_ok=True)
            made = make_rows(
                self._files,
                self._store.read(self._prompts),
                self._store.read(self._held_out_prompts),
                self._target,
                self._chat(),
                self.recipe,
                vocabulary=self._start_vocabulary,
            )
            self._rows, self._held_out, facts = made
            self._rows.save(self._work / "rows")
            self._held_out.save(self._work / "held-out")
            marker.write_text(json.dumps({"key": key, "facts": facts}) + "\n", encoding="utf-8")
        self._facts |= {"data_sha256": key, **read_json(marker)["facts"]}
        return self._rows.describe()

    def train(self, make_engine: Callable[[], Engine]) -> Iterator[Progress]:
        """Train, from the checkpoint if there is one; see `Trainer`. A head's target runs along in an engine."""
        assert self._rows is not None, "rows are built before training"
        assert self._held_out is not None
        recipe = self.recipe
        if recipe.kind == "head":
            engine = functools.cache(make_engine)
            self._rows = self._with_states(self._rows, engine, "rows")
            self._held_out = self._with_states(self._held_out, engine, "held-out")
        torch.manual_seed(recipe.seed)
        config = draft_config(recipe.kind, recipe.shape, self._target.config, self._rows.vocabulary)
        network = DraftNetwork(config, self._table.shape[1], recipe.row_tokens)
        path = self._work / "checkpoint.pt"
        token_ids, target_head = self._rows.vocabulary.token_ids, None
        if recipe.kind == "head":
            target_head = head_rows(self._last_layer, self._table, token_ids).to(self._table.dtype)
        if self._sources.start is not None:
            network.load_tensors({name: t.float() for name, t in _weights(self._sources.start).items()})
        elif recipe.kind == "head":
            initialise_from_target(network, self._last_layer, self._table, token_ids)
            if not path.is_file():  # weights of a checkpoint take the place of all others
                fit_to_states(network, self._table, self._rows, window=recipe.shape.window, seed=recipe.seed)
        else:
            initialise_from_embedding(network, self._table, token_ids)
        self._trainer = Trainer(
            network,
            self._table,
            self._rows,
            self._held_out,
            recipe,
            device=self._device,
            path=path,
            target_head=target_head,
            data_sha256=self._facts["data_sha256"],
        )
        self._network = network
        yield from self._trainer.run()

    def export(self, out: Path) -> Acceptance:
        """Write the draft; its acceptance on all held-out answers.

        A draft that went on from another one is only written if it is no worse than that was.
        """
        assert self._trainer is not None, "training comes before the export"
        assert self._rows is not None
        final = self._score()
        if self._sources.start is not None:
            trained = {name: tensor.clone() for name, tensor in self._network.named_tensors().items()}
            self._network.load_tensors({name: t.float() for name, t in _weights(self._sources.start).items()})
            before = self._score()
            self._facts["acceptance_before"] = before.to_json()
            if final.greedy >= before.greedy:
                self._network.load_tensors(trained)
            else:
                final = before
            self._facts["is_better_than_before"] = final is not before
        provenance = {
            **environment(),
            "target": self._target.name,
            "recipe": self.recipe.to_json(),
            "steps": self._trainer.step,
            "seconds": round(self._trainer.elapsed, 1),
            "data": self._facts,
            "acceptance": final.to_json(),
        }
        export_draft(
            out, self._network, self._rows.vocabulary, self._target, kind=self.recipe.kind, provenance=provenance
        )
        return final

    def _score(self) -> Acceptance:
        assert self._held_out is not None
        return evaluate(
            self._network, self._table.to(self._device), self._held_out,
            window=self.recipe.shape.window, device=self._device,
        )  # fmt: skip

    def _with_states(self, rows: RowSet, make_engine: Callable[[], Engine], name: str) -> RowSet:
        """Rows that know the target's hidden states; those of other data are deleted."""
        path = self._work / f"{name}-{self._facts['data_sha256'][:16]}.states"
        for other in self._work.glob(f"{name}-*.states"):
            if other != path:
                other.unlink()
        return replace(rows, states=TargetStates(rows, self._target.config.hidden_size, make_engine, path))

    def _candidates(self) -> Iterator[SourceFile]:
        """The repository first, then public code in an order that mixes packages."""
        if self._sources.repository is not None:
            yield from tracked_files(self._sources.repository)
        public: list[SourceFile] = []
        if "stdlib" in self.recipe.data:
            public += standard_library()
        if "installed" in self.recipe.data:
            public += installed_packages(self._sources.excluded)
        seed = self.recipe.seed
        yield from sorted(public, key=lambda file: _rank(f"{seed}/{file.package}/{file.path}"))

    def _questions(self, files: Sequence[SourceFile], count: int) -> list[Prompt]:
        has_chat = self._chat() is not None
        # Half as many again as would do if every file had so many definitions.
        per_file = max(_MIN_PROMPTS_PER_FILE, 3 * count // (2 * len(files)))
        prompts = make_prompts(files, per_file=per_file, has_chat=has_chat, seed=self.recipe.seed)
        return list(itertools.islice(prompts, count))

    def _chat(self) -> ChatTemplate | None:
        tokenizer = self._target.tokenizer
        try:
            return ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        except ChatTemplateError:
            return None

    def _data_key(self) -> str:
        recipe = self.recipe
        missing = sum(len(self._store.missing(prompts)) for prompts in (self._prompts, self._held_out_prompts))
        sizes = [recipe.num_answers, recipe.row_tokens, recipe.shape.vocab_size]
        parts = [
            self._facts["files_sha256"],
            files_sha256(self._held_out_files),
            vocabulary_sha256(self._target.tokenizer),
            str(self._sources.start),
            json.dumps([recipe.kind, recipe.syntax, *sizes, recipe.seed]),
            str(missing),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read_start(folder: Path, target: Checkpoint, recipe: Recipe) -> tuple[DraftShape, DraftVocabulary]:
    """Shape and vocabulary of the draft to go on from; the window may be another one."""
    if not (folder / DRAFT_FILE).is_file():
        raise TrainingError(f"{folder} is not a draft that train-draft wrote; it holds no {DRAFT_FILE}")
    settings, raw = read_json(folder / DRAFT_FILE), read_json(folder / "config.json")
    if settings["target"]["vocabulary_sha256"] != vocabulary_sha256(target.tokenizer):
        raise DraftMismatchError(f"{folder} was trained for another vocabulary than that of {target.name}")
    if settings["kind"] != recipe.kind:
        raise TrainingError(
            f"{folder} is a {settings['kind']}, and the draft to train a {recipe.kind}; give its --kind"
        )
    vocabulary = DraftVocabulary(settings["token_ids"], has_escape=bool(settings["has_escape"]))
    shape = replace(
        recipe.shape,
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        intermediate_size=raw["intermediate_size"],
        vocab_size=vocabulary.num_tokens,
        window=raw["sliding_window"],
    )
    return shape, vocabulary


def _weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _rank(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def _is_held_out(key: str) -> bool:
    return int.from_bytes(_rank(f"held out/{key}")[:4], "big") % _HELD_OUT_EVERY == 0


def _fingerprint(table: Tensor) -> str:
    return hashlib.sha256(table[:256].contiguous().numpy().tobytes()).hexdigest()[:12]
