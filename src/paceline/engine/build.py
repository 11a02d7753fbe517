"""Assembles an engine: checkpoint, backend, cache sized to a budget, proposers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.backends.base import Backend
from paceline.backends.cpu import CpuBackend
from paceline.backends.kv_store import HiddenStore, KVShape, KVStore
from paceline.backends.quantized import QuantizedTensor
from paceline.backends.select import num_threads, select_backend
from paceline.cache.manager import KVCacheManager
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.scheduler import Scheduler
from paceline.errors import CacheCapacityError, DraftMismatchError, InvalidParameterError
from paceline.loader.catalog import draft_of
from paceline.loader.draft import DraftCheckpoint, load_draft
from paceline.loader.load import Checkpoint, load_checkpoint
from paceline.loader.resolve import resolve_source
from paceline.loader.tokenizer import Tokenizer
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.runner import HeadRunner, ModelRunner
from paceline.spec.corpus import read_corpus
from paceline.spec.draft_model import DraftModelProposer
from paceline.spec.forced import GrammarLookup
from paceline.spec.ladder import Ladder
from paceline.spec.prediction import PredictionLookup
from paceline.spec.proposer import Lookup, Proposer
from paceline.spec.suffix import CorpusLookup, SuffixLookup
from paceline.spec.verifier import Verifier

# Without a budget of its own the KV cache takes room for this many full contexts, or this share of memory if less.
_DEFAULT_CONTEXTS = 4
_MEMORY_SHARE = 0.25
# Tokens of earlier answers that drafts are looked up in: some 5 MB.
_ANSWER_TOKENS = 2**18


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine runs, for reports."""

    model: str
    draft: str | None
    backend: str
    device: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    drafters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """The parts the public engine is made of."""

    core: EngineCore
    tokenizer: Tokenizer
    info: EngineInfo


def assemble(
    model: str | Path, draft: str | Path | None, config: EngineConfig, corpus: Sequence[str | Path] = ()
) -> AssembledEngine:
    """Load everything and connect it.

    Raises:
        ModelNotFoundError, ModelFormatError, ChecksumError: the model or the draft cannot be loaded.
        DraftMismatchError: the draft speaks another vocabulary.
        BackendUnavailableError: the backend, device or dtype is not there.
        InvalidParameterError: a path of the corpus does not exist.
        CacheCapacityError: the memory budget does not hold one context of the length asked for.
    """
    _set_threads(config)
    backend = select_backend(config.runtime)
    target = _load(model, backend)
    dtype = config.runtime.dtype if config.runtime.dtype != "auto" else _stored_format(target, backend)
    drafter: Checkpoint | None = None
    trained: DraftCheckpoint | None = None
    if draft == "auto":
        draft = draft_of(str(model))
    if draft is not None:
        trained = _load_draft(draft, target, backend)
        drafter = trained.checkpoint

    block_size = config.cache.block_size
    models = [target.config] if drafter is None else [target.config, drafter.config]
    has_head = trained is not None and trained.is_head
    bytes_per_token = sum(backend.kv_bytes_per_token(_kv_shape(shape, block_size)) for shape in models)
    bytes_per_token += HiddenStore.bytes_per_token(target.config.hidden_size) if has_head else 0
    bytes_per_block = bytes_per_token * block_size
    num_blocks, max_model_len = _size_cache(config, target.config.context_length, bytes_per_block, backend.device)

    cache = KVCacheManager(num_blocks, block_size, enable_prefix_cache=config.cache.enable_prefix_cache)
    num_slots = num_blocks * block_size
    states: HiddenStore | None = None
    if has_head:
        states = HiddenStore(num_slots, target.config.hidden_size, device=backend.device)
    decoder, store = _make_decoder(target, backend, num_slots, max_model_len)
    runner = ModelRunner(decoder, store, block_size=block_size, device=backend.device, states=states)
    proposers: list[Proposer] = []
    if drafter is not None and trained is not None:
        draft_context = min(drafter.config.context_length, max_model_len)
        decoder, store = _make_decoder(drafter, backend, num_slots, draft_context)
        if states is None:
            draft_runner = ModelRunner(decoder, store, block_size=block_size, device=backend.device)
        else:
            draft_runner = HeadRunner(decoder, store, block_size=block_size, device=backend.device, states=states)
        proposers.append(
            DraftModelProposer(
                draft_runner,
                cache,
                context_length=draft_context,
                vocab_limit=target.tokenizer.vocab_size,
                end_token_ids=target.tokenizer.eos_token_ids,
                vocabulary=trained.vocabulary,
                reach=drafter.config.reach,
            )
        )
    repository = read_corpus(corpus, target.tokenizer) if corpus else None
    lookups: list[Lookup] = [
        GrammarLookup(),
        PredictionLookup(target.tokenizer),
        SuffixLookup(),
        CorpusLookup(_ANSWER_TOKENS, repository),
    ]
    ladder = Ladder(lookups, proposers)
    core = EngineCore(
        scheduler=Scheduler(config.scheduler, cache),
        cache=cache,
        runner=runner,
        ladder=ladder,
        verifier=Verifier(vocab_limit=target.tokenizer.vocab_size),
        block_size=block_size,
        num_blocks=num_blocks,
    )
    info = EngineInfo(
        model=target.name,
        draft=drafter.name if drafter is not None else None,
        backend=backend.name,
        device=str(backend.device),
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * bytes_per_block,
        drafters=tuple(ladder.sources),
    )
    return AssembledEngine(core, target.tokenizer, info)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, draft_name: str) -> None:
    """A draft's token ids must mean the same strings; trailing padding rows of either matrix do not matter.

    Raises:
        DraftMismatchError: names the first id at which the two differ.
    """
    for token_id in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token_string(token_id), draft.token_string(token_id)
        if ours != theirs:
            raise DraftMismatchError(
                f"draft {draft_name} has another vocabulary: token {token_id} is {theirs!r} there and {ours!r} in the "
                "target; use a draft of the same model family"
            )


def _make_decoder(
    checkpoint: Checkpoint, backend: Backend, num_slots: int, num_positions: int
) -> tuple[Decoder, KVStore]:
    """A model on a backend and the room for its K/V; the weights are taken over."""
    shape = checkpoint.config
    decoder: Decoder
    if isinstance(backend, CpuBackend):
        from paceline.model.native import NativeDecoder  # imports the kernels

        decoder = NativeDecoder(shape, checkpoint.weights, backend, num_positions=num_positions)
    else:
        decoder = Decoder(shape, checkpoint.weights, backend, num_positions=num_positions)
    return decoder, backend.make_kv_store(_kv_shape(shape, num_slots))


def _kv_shape(shape: ModelConfig, num_slots: int) -> KVShape:
    return KVShape(num_slots, shape.num_layers, shape.num_kv_heads, shape.head_dim)


def _load(source: str | Path, backend: Backend) -> Checkpoint:
    return load_checkpoint(
        resolve_source(str(source)),
        dtype=backend.dtype,
        device=backend.device,
        keep_quantized=backend.keeps_quantized,
    )


def _load_draft(source: str | Path, target: Checkpoint, backend: Backend) -> DraftCheckpoint:
    """A draft that speaks the target's token ids."""
    draft = load_draft(
        resolve_source(str(source)),
        target,
        dtype=backend.dtype,
        device=backend.device,
        keep_quantized=backend.keeps_quantized,
    )
    checkpoint = draft.checkpoint
    check_same_vocabulary(target.tokenizer, checkpoint.tokenizer, checkpoint.name)
    if checkpoint.config.vocab_size < target.tokenizer.vocab_size:
        raise DraftMismatchError(
            f"draft {checkpoint.name} knows only the first {checkpoint.config.vocab_size} of the target's "
            f"{target.tokenizer.vocab_size} tokens; use a draft of the same model family"
        )
    return draft


def _stored_format(checkpoint: Checkpoint, backend: Backend) -> str:
    """What ``dtype="auto"`` comes to, for reports."""
    if not backend.keeps_quantized:
        return "fp32" if backend.dtype == torch.float32 else "bf16"
    bits = [weight.bits for weight in checkpoint.weights.values() if isinstance(weight, QuantizedTensor)]
    return f"int{min(bits)}" if bits else "bf16"


def _size_cache(
    config: EngineConfig, context_length: int, bytes_per_block: int, device: torch.device
) -> tuple[int, int]:
    """Number of blocks and the longest context they allow."""
    block_size = config.cache.block_size
    asked_length = config.scheduler.max_model_len
    if asked_length is not None and asked_length > context_length:
        raise InvalidParameterError(
            f"max_model_len {asked_length} is more than the model's context of {context_length} tokens; lower it"
        )
    length = asked_length or context_length
    budget = config.cache.kv_memory_bytes
    blocks_per_context = -(-length // block_size)
    if budget is None:
        affordable = int(_MEMORY_SHARE * _memory_bytes(device)) // bytes_per_block
        num_contexts = min(_DEFAULT_CONTEXTS, config.scheduler.max_num_seqs)
        num_blocks = min(num_contexts * blocks_per_context, affordable)
    else:
        num_blocks = budget // bytes_per_block
    if num_blocks >= blocks_per_context:
        return num_blocks, length
    if asked_length is None and budget is None and num_blocks > 0:
        return num_blocks, num_blocks * block_size  # the model's full context is more than this machine affords
    raise CacheCapacityError(
        f"a context of {length} tokens needs {blocks_per_context * bytes_per_block / 2**20:.0f} MiB of KV cache, but "
        f"the budget holds {num_blocks * block_size} tokens; raise kv_memory_bytes or lower max_model_len"
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _set_threads(config: EngineConfig) -> None:
    """Threads are the process's, not the engine's: set only when the caller or the environment names a number."""
    if config.runtime.num_threads is not None or os.environ.get("PACELINE_NUM_THREADS"):
        torch.set_num_threads(num_threads(config.runtime))
