"""Training: it learns, it resumes to the bit, it says what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.errors import InvalidParameterError, TrainingError
from paceline.model.config import ModelConfig
from paceline.train.dataset import RowSet
from paceline.train.loop import Trainer, rate_at, stage_at
from paceline.train.network import DraftNetwork, initialise_from_embedding
from paceline.train.recipe import DraftShape, Recipe
from tests.unit.train.workshop import SHAPE, make_recipe, make_rows

CPU = torch.device("cpu")


class FixedStates:
    """A function of the row, in place of a target's states."""

    def of(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.stack([torch.randn(32, 16, generator=torch.Generator().manual_seed(int(row))) for row in rows])


def make_trainer(path: Path, recipe: Recipe, rows: RowSet | None = None, *, data: str = "") -> Trainer:
    rows, held_out = rows or make_rows(), make_rows(8, seed=1)
    state_size = 16 if recipe.kind == "head" else None
    if state_size is not None:
        rows, held_out = (dataclasses.replace(item, states=FixedStates()) for item in (rows, held_out))
    torch.manual_seed(recipe.seed)
    table = torch.randn(64, 24)
    config = ModelConfig(
        architecture="mistral", vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=8, context_length=64, rms_norm_eps=1e-5, rope_theta=1e4,
        sliding_windows=(SHAPE.window,) * 2, num_logits=rows.vocabulary.num_logits, state_size=state_size,
    )  # fmt: skip
    network = DraftNetwork(config, 24, recipe.row_tokens)
    initialise_from_embedding(network, table, rows.vocabulary.token_ids)
    return Trainer(
        network, table, rows, held_out, recipe, device=CPU, path=path, data_sha256=data, checkpoint_seconds=0.0
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._network.named_tensors().items()}


def test_the_rule_is_learnt(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "c.pt", make_recipe(steps=150), make_rows(60))
    history = list(trainer.run())
    assert trainer.first is not None
    assert trainer.latest is not None
    assert trainer.latest.greedy > 0.75 > trainer.first.greedy
    assert trainer.latest.tokens_per_pass[8] > 2
    assert history[-1].share == 1
    assert [at.step for at in history] == list(range(1, 151))


@pytest.mark.parametrize(("kind", "stop_after"), [("model", 1), ("model", 5), ("model", 11), ("head", 1), ("head", 7)])
def test_a_run_that_was_cut_off_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, kind: str, stop_after: int
) -> None:
    recipe = make_recipe(kind=kind)
    whole = make_trainer(tmp_path / "whole.pt", recipe)
    losses = [at.loss for at in whole.run()]
    cut = make_trainer(tmp_path / "cut.pt", recipe)
    steps = cut.run()
    first = [next(steps).loss for _ in range(stop_after)]
    steps.close()
    resumed = make_trainer(tmp_path / "cut.pt", recipe)
    assert resumed.step == stop_after
    assert first + [at.loss for at in resumed.run()] == losses
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name
    assert resumed.latest == whole.latest


def test_an_old_checkpoint_is_as_good_as_a_new_one(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole.pt", make_recipe())
    list(whole.run())
    cut = make_trainer(tmp_path / "cut.pt", make_recipe())
    steps = cut.run()
    for _ in range(3):
        next(steps)
    cut._checkpoint_seconds = 1e9  # killed long after the last checkpoint
    for _ in range(5):
        next(steps)
    resumed = make_trainer(tmp_path / "cut.pt", make_recipe())
    assert resumed.step == 3
    list(resumed.run())
    assert all(torch.equal(weights(resumed)[name], tensor) for name, tensor in weights(whole).items())


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    list(make_trainer(tmp_path / "c.pt", make_recipe()).run())
    assert list(make_trainer(tmp_path / "c.pt", make_recipe()).run()) == []


def test_another_recipe_does_not_go_on_with_a_checkpoint(tmp_path: Path) -> None:
    list(make_trainer(tmp_path / "c.pt", make_recipe()).run())
    with pytest.raises(TrainingError, match="another folder"):
        make_trainer(tmp_path / "c.pt", make_recipe(seed=1))
    with pytest.raises(TrainingError, match="other data"):
        make_trainer(tmp_path / "c.pt", make_recipe(), data="changed")


def test_a_time_budget_ends_a_run(tmp_path: Path) -> None:
    history = list(make_trainer(tmp_path / "c.pt", make_recipe(steps=None, minutes=0.01)).run())
    assert history[-1].share == 1
    assert history[-1].seconds_left == 0
    assert {at.stage for at in history} == {"ce", "kl", "lk"}


def test_nothing_to_train_on_is_said(tmp_path: Path) -> None:
    rows = make_rows(0)
    with pytest.raises(TrainingError, match="nothing to train on"):
        make_trainer(tmp_path / "c.pt", make_recipe(), rows)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [rate_at(share / 100) for share in range(101)]
    assert rates[0] < rates[1] < rates[2] == rates[50] == rates[80] == 1
    assert rates[85] > rates[95] > rates[100] > 0


def test_a_head_is_followed_further_into_a_draft_than_a_model(tmp_path: Path) -> None:
    depths = {}
    for kind in ("model", "head"):
        trainer = make_trainer(tmp_path / f"{kind}.pt", make_recipe(kind=kind, steps=1))
        list(trainer.run())
        assert trainer.latest is not None
        assert trainer.latest.by_depth[0] == trainer.latest.greedy
        depths[kind] = len(trainer.latest.by_depth)
    assert depths == {"model": 1, "head": 4}


def test_the_recipe_of_a_model_does_not_name_what_only_a_head_has() -> None:
    assert "unroll" not in make_recipe().to_json()
    assert make_recipe(kind="head").to_json()["unroll"] == 3


def test_stages_come_in_their_order() -> None:
    stages = [stage_at(("ce", "kl", "lk"), share / 100) for share in range(101)]
    assert [stages.count(name) for name in ("ce", "kl", "lk")] == [25, 50, 26]
    assert stage_at(("kl",), 0.99) == "kl"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "oracle"}, "--kind"),
        ({"syntax": ["window"]}, "--syntax"),
        ({"losses": []}, "losses"),
        ({"data": ["hub"]}, "--data"),
        ({"steps": None}, "either --steps or --time-budget"),
        ({"minutes": 3}, "either --steps or --time-budget"),
        ({"steps": 0}, "positive"),
        ({"learning_rate": 0}, "learning rate"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"num_answers": -1}, "negative"),
        ({"unroll": 0}, "unroll"),
    ],
)
def test_impossible_recipes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        make_recipe(**changes)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="heads"):
        dataclasses.replace(SHAPE, num_kv_heads=3)
    with pytest.raises(InvalidParameterError, match="num_layers"):
        DraftShape.of_width(256, 0, 100, 10)
    assert DraftShape.of_width(256, 4, 8192, 256) == DraftShape()
