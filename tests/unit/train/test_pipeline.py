"""From source files to a draft that the engine loads, through the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline import DraftMismatchError, Engine, ModelFormatError, SamplingParams, Speculation
from paceline.backends.kv_store import KVShape
from paceline.backends.metadata import AttentionMetadata, SequenceSlice
from paceline.backends.torch_ref import TorchBackend
from paceline.loader.draft import EMBEDDING, load_draft
from paceline.loader.load import load_checkpoint
from paceline.model.decoder import Decoder
from paceline.model.draft_vocabulary import DraftVocabulary
from paceline.train.export import draft_config, export_draft
from paceline.train.network import DraftNetwork
from paceline.train.recipe import DraftShape
from tests.support import write_tiny_checkpoint
from tests.unit.cli.conftest import Result
from tests.unit.train.workshop import SHAPE, write_code_target, write_repository

OPTIONS = (
    *("--keep-out", "none", "--data", "none", "--answers", 12, "--steps", 4, "--row-tokens", 128, "--batch-rows", 4),
    *("--vocab-size", 40, "--window", 32, "--threads", 1),
)
MODEL = ("--hidden-size", 32, "--layers", 1)
HEAD = ("--kind", "head", "--batch-rows", 2, "--unroll", 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_code_target(tmp_path_factory.mktemp("target") / "code")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("repository") / "sums")


@pytest.fixture
def train(
    cli: Callable[..., Result],
    target: Path,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Result]:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))

    def call(out: Path, *more: object) -> Result:
        kind = () if "head" in more else MODEL
        return cli("train-draft", out, "--model", target, "--repo", repository, *OPTIONS, *kind, *more)

    return call


def assert_changes_no_token(target: Path, draft: Path) -> None:
    with Engine(target, draft=draft) as engine:
        prompt = engine.tokenizer.encode("def largest(items):\n    best = ")
        for params in (SamplingParams(max_tokens=40), SamplingParams(temperature=1.0, seed=5, max_tokens=40)):
            plain = engine.generate(prompt, params, speculation=Speculation(mode="off"))
            drafted = engine.generate(prompt, params, speculation=Speculation("static", 4, drafters=("model",)))
            assert drafted.token_ids == plain.token_ids
            assert drafted.speculation.num_draft_tokens > 0


def test_the_command_trains_a_draft_that_changes_no_token(
    train: Callable[..., Result], target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    result = train(out)
    assert result.status == 0, result.err
    assert "use it with: paceline run --draft" in result.err
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["steps"] == 4
    assert provenance["argv"][:3] == ["paceline", "train-draft", str(out)]
    assert provenance["acceptance"]["num_tokens"] > 100
    assert provenance["data"]["licences"] == {"repository.sums": "the user's own"}
    assert set(provenance["data"]["examples"]) >= {"window", "edit", "completion", "continuation", "answer: task"}
    assert len(json.loads((out / "draft.json").read_text())["token_ids"]) == 40
    assert_changes_no_token(target, out)

    # The same command again has nothing left to do and gives the same weights; answers are not asked for again.
    before = (out / "model.safetensors").read_bytes()
    again = train(out)
    assert again.status == 0
    assert (out / "model.safetensors").read_bytes() == before

    # From there on, for the repository: never worse than it was.
    adapted = train(tmp_path / "adapted", "--init", out, "--syntax", "none", "--losses", "kl", "--learning-rate", 1e-4)
    assert adapted.status == 0, adapted.err
    report = json.loads((tmp_path / "adapted" / "provenance.json").read_text())
    assert report["acceptance"]["greedy"] >= report["data"]["acceptance_before"]["greedy"]
    assert set(report["data"]["examples"]) == {
        "window",
        "answer: agent",
        "answer: task",
        "answer: completion",
        "answer: implement",
    } & set(report["data"]["examples"]) | {"window"}


def test_a_head_is_trained_by_the_same_command(train: Callable[..., Result], target: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    result = train(out, *HEAD)
    assert result.status == 0, result.err
    assert "token 2 of a draft" in result.err
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["recipe"]["kind"] == "head"
    assert provenance["recipe"]["learning_rate"] == 8e-4
    assert json.loads((out / "draft.json").read_text())["kind"] == "head"
    assert_changes_no_token(target, out)
    before = (out / "model.safetensors").read_bytes()
    assert train(out, *HEAD).status == 0
    assert (out / "model.safetensors").read_bytes() == before
    adapted = train(tmp_path / "adapted", *HEAD, "--init", out, "--losses", "kl")
    assert adapted.status == 0, adapted.err
    other = train(tmp_path / "other", "--init", out)
    assert other.status == 2
    assert "is a head, and the draft to train a model" in other.err


def test_plain_text_without_the_target_is_a_possible_arm(train: Callable[..., Result], tmp_path: Path) -> None:
    result = train(tmp_path / "plain", "--answers", 0, "--syntax", "none", "--losses", "ce")
    assert result.status == 0, result.err
    data = json.loads((tmp_path / "plain" / "provenance.json").read_text())["data"]
    assert set(data["examples"]) == {"window"}
    assert data["rows"]["tokens_with_target_probabilities"] == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--kind", "oracle"), "--kind knows model, head"),
        (("--kind", "head", "--layers", 2), "a head is one layer of the target's width"),
        (("--keep-out", "mmlu"), "--keep-out knows"),
        (("--time-budget", 1), "either --steps or --time-budget"),
        (("--init", "/nowhere"), "not a draft that train-draft wrote"),
        (("--init", "auto"), "no draft goes with"),
        (("--repo", "/"), "git repository"),
        (("--device", "warp"), "cannot be used"),
    ],
)
def test_mistakes_are_one_line(
    train: Callable[..., Result], tmp_path: Path, more: tuple[object, ...], message: str
) -> None:
    result = train(tmp_path / "draft", *more)
    assert result.status == 2
    assert message in result.err


def export(folder: Path, target_path: Path, shape: DraftShape = SHAPE) -> DraftNetwork:
    """An untrained draft on disk."""
    target = load_checkpoint(target_path, dtype=torch.float32)
    vocabulary = DraftVocabulary(range(3, 60, 2), has_escape=True)
    torch.manual_seed(4)
    network = DraftNetwork(draft_config("model", shape, target.config, vocabulary), target.config.hidden_size, 64)
    export_draft(folder, network, vocabulary, target, kind="model", provenance={})
    return network


def test_the_engine_computes_what_was_trained(target: Path, tmp_path: Path) -> None:
    network = export(tmp_path, target)
    checkpoint = load_checkpoint(target, dtype=torch.float32)
    table = checkpoint.weights[EMBEDDING]
    assert isinstance(table, torch.Tensor)
    network.load_tensors({name: tensor.bfloat16().float() for name, tensor in network.named_tensors().items()})
    token_ids = torch.arange(3, 43)
    with torch.no_grad():
        documents = torch.zeros(1, 40, dtype=torch.int64)
        [hidden] = network(table[token_ids][None], documents, window=SHAPE.window)
        expected = network.logits(hidden[0])
    draft = load_draft(tmp_path, checkpoint, dtype=torch.float32)
    backend = TorchBackend(torch.device("cpu"), torch.float32)
    decoder = Decoder(draft.checkpoint.config, draft.checkpoint.weights, backend, num_positions=64)
    store = backend.make_kv_store(KVShape(48, SHAPE.num_layers, SHAPE.num_kv_heads, 8))
    metadata = AttentionMetadata([SequenceSlice(0, 40, 40, [0, 1, 2])], 16, backend.device)
    found = decoder.logits(decoder.forward(token_ids, torch.arange(40), store, metadata))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_head_of_another_width_than_its_target_is_refused(target: Path, tmp_path: Path) -> None:
    export(tmp_path, target)  # 16 wide, for a target of 32
    settings = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps(settings | {"kind": "head"}))
    with pytest.raises(ModelFormatError, match="a head of width 16 for a target of 32"):
        Engine(target, draft=tmp_path)


def test_a_draft_for_another_target_is_refused(target: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    export(tmp_path / "draft", target)
    with pytest.raises(DraftMismatchError, match="vocabulary"):
        Engine(tiny_checkpoint, draft=tmp_path / "draft")
    wide = write_tiny_checkpoint(tmp_path / "wide", "llama", hidden_size=64)
    (wide / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    with pytest.raises(DraftMismatchError, match="of width 32"):
        Engine(wide, draft=tmp_path / "draft")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "format 99"),
        ({"kind": "oracle"}, "lacks a known kind"),
        ({"token_ids": [5, 3]}, "ascend"),
        ({"token_ids": []}, "ascend"),
        ({"token_ids": [3, 4, 5]}, "has shape"),
    ],
)
def test_a_damaged_draft_says_so(target: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    export(tmp_path, target)
    settings = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps(settings | change))
    with pytest.raises(ModelFormatError, match=message):
        Engine(target, draft=tmp_path)
