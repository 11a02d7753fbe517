"""What a row's logits owe to the tokens before it: penalties, bias and the ban on ending too early.

The meaning is that of the OpenAI API and of vLLM. Bias is added first. The repetition penalty divides the positive and
multiplies the negative logits of every token in the prompt or the output (Keskar et al., CTRL, arXiv 1909.05858). For
tokens in the output only, presence is subtracted once and frequency once per occurrence.

Row i of a verify pass follows the committed tokens and drafts 0 to i - 1, and is penalised for exactly those: the row
is then bit for bit the one that plain decoding would have seen (law 4). No mask is shared between rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import InvalidParameterError
from paceline.request import SamplingParams


class TokenHistory:
    """How often each token occurs in one request; ``append`` what is committed and it stays current.

    The tables are built at the first use, so a request without penalties pays nothing for its prompt. After that an
    append costs its own length and a penalty costs the vocabulary, however long the context is.
    """

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int] = ()) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._pending = list(output_token_ids)  # output tokens not yet counted in the tables
        self._num_output_tokens = len(self._pending)
        self._in_prompt = np.zeros(0, dtype=np.bool_)  # [vocab_size]
        self._output_counts = np.zeros(0, dtype=np.int32)  # [vocab_size]

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens so far."""
        return self._num_output_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Count newly committed output tokens."""
        self._pending.extend(token_ids)
        self._num_output_tokens += len(token_ids)

    def tables(self, vocab_size: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
        """Whether each token is in the prompt, and how often in the output: two views of [vocab_size]; do not write."""
        self._grow(vocab_size)
        if self._pending:
            self._grow(max(self._pending) + 1)
            np.add.at(self._output_counts, self._pending, 1)
            self._pending = []
        return self._in_prompt[:vocab_size], self._output_counts[:vocab_size]

    def _grow(self, size: int) -> None:
        # A draft model may have a wider or narrower vocabulary than the target: the widest one asked for is kept.
        num_counted = self._in_prompt.size
        if size <= num_counted:
            return
        if num_counted == 0:
            size = max(size, max(self._prompt_token_ids, default=-1) + 1)
        in_prompt, output_counts = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.int32)
        in_prompt[:num_counted], output_counts[:num_counted] = self._in_prompt, self._output_counts
        if num_counted == 0:
            in_prompt[np.asarray(self._prompt_token_ids, dtype=np.intp)] = True
        self._in_prompt, self._output_counts = in_prompt, output_counts


def require_valid_bias(params: SamplingParams, vocab_size: int) -> None:
    """Check a request's logit bias against the model at admission, where the caller can still be told.

    Raises:
        InvalidParameterError: an id outside the vocabulary, or a bias that is not a number.
    """
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidParameterError(
                f"logit_bias names token {token_id}, but this model has ids from 0 to {vocab_size - 1}"
            )
        if math.isnan(bias):
            raise InvalidParameterError(f"logit_bias of token {token_id} is not a number")


def apply_penalties(
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    draft_token_ids: Sequence[int] = (),
    end_token_ids: Collection[int] = (),
    *,
    only_last_row: bool = False,
) -> Tensor:
    """The logits as adjusted for what precedes each row; ids outside the vocabulary have no effect.

    Args:
        logits: [num_rows, vocab_size] of any float dtype; never modified.
        params: which adjustments to make.
        history: the committed tokens.
        draft_token_ids: row i follows the committed tokens and ``draft_token_ids[:i]``.
        end_token_ids: what, beside ``params.stop_token_ids``, must not occur before ``params.min_tokens``.
        only_last_row: the logits are the single row after all the drafts, as a draft model computes them.

    Returns:
        [num_rows, vocab_size]; float32 and new, or the logits themselves when there is nothing to adjust.
    """
    first_row = len(draft_token_ids) if only_last_row else 0
    assert not only_last_row or logits.shape[0] == 1
    num_early_rows = params.min_tokens - history.num_output_tokens - first_row
    has_repetition = params.repetition_penalty != 1.0
    has_counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if not (params.logit_bias or has_repetition or has_counts or num_early_rows > 0):
        return logits
    adjusted = logits.detach().to(torch.float32, copy=True)
    _add_bias(adjusted, params)
    if has_repetition or has_counts:
        _penalise(adjusted, params, history, draft_token_ids, first_row)
    if num_early_rows > 0:
        banned = _within(adjusted, (*end_token_ids, *params.stop_token_ids))
        adjusted[:num_early_rows, banned] = -torch.inf
    return adjusted


def _add_bias(adjusted: Tensor, params: SamplingParams) -> None:
    token_ids = _within(adjusted, tuple(params.logit_bias))
    if token_ids.numel() > 0:
        bias = [params.logit_bias[token_id] for token_id in token_ids.tolist()]
        adjusted[:, token_ids] += torch.tensor(bias, dtype=torch.float32, device=adjusted.device)


def _penalise(
    adjusted: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    draft_token_ids: Sequence[int],
    first_row: int,
) -> None:
    num_rows, vocab_size = adjusted.shape
    in_prompt, output_counts = history.tables(vocab_size)
    drafts = [token_id for token_id in draft_token_ids if token_id < vocab_size]
    is_touched = output_counts > 0
    if params.repetition_penalty != 1.0:
        is_touched |= in_prompt
    is_touched[drafts] = True
    touched = np.flatnonzero(is_touched)  # [num_touched], ascending

    counts = np.repeat(output_counts[np.newaxis, touched], num_rows, axis=0)  # [num_rows, num_touched]
    for i, token_id in enumerate(draft_token_ids):
        if token_id < vocab_size:  # draft i stands before every row after it
            counts[max(0, i + 1 - first_row) :, np.searchsorted(touched, token_id)] += 1
    occurs = torch.from_numpy(counts > 0).to(adjusted.device)
    occurrences = torch.from_numpy(counts).to(adjusted.device, torch.float32)
    is_seen = occurs | torch.from_numpy(in_prompt[touched]).to(adjusted.device)

    columns = torch.from_numpy(touched).to(adjusted.device)
    values = adjusted[:, columns]
    if params.repetition_penalty != 1.0:
        weakened = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        values = torch.where(is_seen, weakened, values)
    values = values - occurrences * params.frequency_penalty
    values = values - occurs * params.presence_penalty
    adjusted[:, columns] = values


def _within(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    inside = [token_id for token_id in token_ids if 0 <= token_id < logits.shape[-1]]
    return torch.tensor(inside, dtype=torch.int64, device=logits.device)
