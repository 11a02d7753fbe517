"""The training loop. Its state is the step number, the weights and the optimiser's moments: all in one checkpoint.

Which rows a step sees, its learning rate and its loss follow from the step number, so a run with a fixed number of
steps that is killed and resumed ends with the bits of one that was not (on the same machine and threads).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import TrainingError
from paceline.train.dataset import Batch, RowSet, row_order
from paceline.train.evaluation import Acceptance, evaluate
from paceline.train.losses import LOGIT_ROWS, position_losses
from paceline.train.network import DraftNetwork
from paceline.train.recipe import Recipe
from paceline.train.states import taught_by_states

_WARM_UP, _DECAY = 0.02, 0.2  # shares of the run
_FINAL_RATE = 0.02  # of the peak
_FIRST_STEPS = 40  # rise to the peak however short the run is: until then the optimiser knows no gradient's size
_STAGE_SHARES = {"ce": 1.0, "kl": 2.0, "lk": 1.0}
_LATER_WEIGHT = 0.8  # of an unrolled step against the one before: fewer drafts get that far
_EVALUATIONS = 10
_EVALUATION_ROWS = 48  # of a model; a head goes through each several times


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step. ``acceptance`` is the latest one measured on the held-out answers."""

    step: int
    share: float
    loss: float
    stage: str
    seconds_left: float
    tokens_per_s: float
    acceptance: Acceptance | None


class Trainer:
    """Trains ``network`` in place; `run` goes on from the checkpoint at ``path`` if there is one.

    ``table`` [vocab_size, embedding_size] is the target's embedding; ``target_head``, for a head, the rows of the
    target's own head for the listed tokens (see `taught_by_states`). A checkpoint is written every
    ``checkpoint_seconds`` and at the end, and goes on with the data of ``data_sha256`` only.

    Raises:
        TrainingError: no rows, or a checkpoint of another recipe or other data.
    """

    def __init__(
        self,
        network: DraftNetwork,
        table: Tensor,
        rows: RowSet,
        held_out: RowSet,
        recipe: Recipe,
        *,
        device: torch.device,
        path: Path,
        target_head: Tensor | None = None,
        data_sha256: str = "",
        checkpoint_seconds: float = 60.0,
    ) -> None:
        if rows.num_rows == 0:
            raise TrainingError("there is nothing to train on; name more data, a larger repository, or more answers")
        self._network = network.to(device)
        self._table = table.to(device)
        self._target_head = target_head.to(device) if target_head is not None else None
        self._rows, self._held_out, self._recipe, self._device = rows, held_out, recipe, device
        self._path, self._data_sha256, self._checkpoint_seconds = path, data_sha256, checkpoint_seconds
        matrices = [item for item in network.parameters() if item.dim() > 1]
        vectors = [item for item in network.parameters() if item.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
        )
        self.step = 0
        self.elapsed = 0.0  # seconds of training, over all sittings
        self.first: Acceptance | None = None
        self.latest: Acceptance | None = None
        self._num_evaluations = 0
        self._restore()

    @property
    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self._recipe.steps is not None:
            return self.step / self._recipe.steps
        assert self._recipe.minutes is not None
        return min(1.0, self.elapsed / (60 * self._recipe.minutes))

    def run(self) -> Iterator[Progress]:
        """Train to the end, a step at a time."""
        if self.first is None:
            self.first = self.latest = self._evaluate()
        started = saved = time.monotonic()
        before = self.elapsed
        num_tokens = 0
        while self.share < 1:
            stage = stage_at(self._recipe.losses, self.share)
            chosen = row_order(self._rows.num_rows, self._recipe.batch_rows, self.step, self._recipe.seed)
            loss = self._take_step(self._rows.batch(chosen, self._device), stage)
            self.step += 1
            num_tokens += chosen.size * self._recipe.row_tokens
            now = time.monotonic()
            self.elapsed = before + now - started
            if math.floor(self.share * _EVALUATIONS) > self._num_evaluations:
                self._num_evaluations = math.floor(self.share * _EVALUATIONS)
                self.latest = self._evaluate()
            if self.share >= 1 or now - saved >= self._checkpoint_seconds:
                self._save()
                saved = now
            yield Progress(
                step=self.step,
                share=self.share,
                loss=loss,
                stage=stage,
                seconds_left=self.elapsed / self.share * (1 - self.share),
                tokens_per_s=num_tokens / (now - started),
                acceptance=self.latest,
            )

    def _take_step(self, batch: Batch, stage: str) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * rate_at(self.share) * min(1.0, (self.step + 1) / _FIRST_STEPS)
        self._optimizer.zero_grad(set_to_none=True)
        num_steps = self._recipe.num_unrolled
        with self._precision():
            steps = self._network(
                self._table[batch.tokens].to(self._activation_dtype),
                batch.documents,
                window=self._recipe.shape.window,
                states=batch.states.to(self._activation_dtype) if batch.states is not None else None,
                num_steps=num_steps,
            )
        hidden = torch.cat([states[batch.asked] for states in steps])
        targets = batch.targets if self._target_head is None else taught_by_states(batch, self._target_head)
        targets = targets.repeated(num_steps)
        weights = torch.cat([batch.weights * _LATER_WEIGHT**step for step in range(num_steps)])
        # The head in slices: its logits are by far the largest tensors, and none is needed twice.
        leaf = hidden.detach().requires_grad_()
        total = 0.0
        scale = 1 / weights.sum().clamp_min(1e-6)
        for start in range(0, leaf.shape[0], LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            with self._precision():
                logits = self._network.logits(leaf[part])
            losses = position_losses(logits.float(), targets.part(part), stage)
            loss = (losses * weights[part]).sum() * scale
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if leaf.grad is not None:
            hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
        if not math.isfinite(total):
            raise TrainingError(f"the loss is {total} at step {self.step}; lower --learning-rate and start anew")
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimizer.step()
        return total

    def _evaluate(self) -> Acceptance:
        return evaluate(
            self._network,
            self._table,
            self._held_out,
            window=self._recipe.shape.window,
            device=self._device,
            max_rows=_EVALUATION_ROWS // self._recipe.num_unrolled,
        )

    @property
    def _activation_dtype(self) -> torch.dtype:
        return torch.bfloat16 if has_fast_bf16(self._device) else torch.float32

    def _precision(self) -> AbstractContextManager[Any]:
        if not has_fast_bf16(self._device):
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _save(self) -> None:
        """Write the checkpoint whole or not at all."""
        part = self._path.with_suffix(".part")
        state = {
            "recipe": self._recipe.to_json(),
            "data_sha256": self._data_sha256,
            "step": self.step,
            "elapsed": self.elapsed,
            "num_evaluations": self._num_evaluations,
            "first": self.first.to_json() if self.first is not None else None,
            "latest": self.latest.to_json() if self.latest is not None else None,
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, part)
        part.replace(self._path)

    def _restore(self) -> None:
        if not self._path.is_file():
            return
        state = torch.load(self._path, map_location=self._device, weights_only=True)
        if state["recipe"] != self._recipe.to_json():
            raise TrainingError(
                f"{self._path} was written with another recipe; give the options of that run to go on with it, or "
                "another folder to start anew"
            )
        if state["data_sha256"] != self._data_sha256:
            raise TrainingError(
                f"{self._path} was written for other data: source files have changed since; give another folder to "
                "start anew, or bring the files back"
            )
        self.step, self.elapsed, self._num_evaluations = state["step"], state["elapsed"], state["num_evaluations"]
        self.first, self.latest = (
            Acceptance(**state[name]) if state[name] is not None else None for name in ("first", "latest")
        )
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])


def has_fast_bf16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32 there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def rate_at(share: float) -> float:
    """Learning rate relative to its peak: a short rise, a plateau, a straight decay at the end."""
    if share < _WARM_UP:
        return max(share / _WARM_UP, 0.02)
    if share > 1 - _DECAY:
        return _FINAL_RATE + (1 - _FINAL_RATE) * (1 - share) / _DECAY
    return 1.0


def stage_at(losses: Sequence[str], share: float) -> str:
    """The loss in use when ``share`` of the run is done; the middle one gets twice the time of the others."""
    total = sum(_STAGE_SHARES[name] for name in losses)
    reached = 0.0
    for name in losses:
        reached += _STAGE_SHARES[name] / total
        if share < reached:
            return name
    return losses[-1]
