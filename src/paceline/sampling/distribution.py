"""From logits to probabilities: ONE function for the draft, the target and the sampler (law 4).

Each row is treated on its own with a fixed order of summation, so that its result does not depend on how many rows
stand beside it (law 6): torch would split the sum of a single row among threads. On the CPU the work is therefore done
by numpy, on one thread. That is also faster: a few rows of logits are too little work to wake a thread pool for, and on
a busy machine the wait for its slowest thread takes milliseconds.

Ties are always broken towards the lower token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.records import TokenLogprob
from paceline.request import SamplingParams

Row = npt.NDArray[np.float32]

# A row has at most 1 / cutoff tokens of at least that probability. If those already hold the mass or the number asked
# for, nothing else needs sorting; the last step takes the whole row.
_CUTOFFS = (2.0**-10, 2.0**-17, 0.0)


def as_array(tensor: Tensor) -> npt.NDArray[np.float32]:
    """The values as a float32 array: a view of the tensor where it lives on the CPU as float32, else a copy."""
    array: npt.NDArray[np.float32] = tensor.detach().to("cpu", torch.float32).numpy()
    return array


def argmax_lowest(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id on a tie; 0 where every token is forbidden.

    Args:
        logits: [num_rows, vocab_size] of any float dtype.

    Returns:
        [num_rows], int64.

    Raises:
        ModelFormatError: a row holds NaN.
    """
    # Both argmaxes return the position of a NaN if there is one, which makes the check one element per row.
    if logits.device.type == "cpu":
        # numpy promises the first of equal maxima and is several times faster than torch here.
        values = as_array(logits)
        positions = np.argmax(values, axis=-1)
        _refuse_nan(bool(np.isnan(values[np.arange(len(values)), positions]).any()))
        return torch.from_numpy(positions)
    token_ids = logits.argmax(dim=-1)
    _refuse_nan(bool(torch.isnan(logits.gather(-1, token_ids.unsqueeze(-1))).any()))
    return token_ids


def to_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that tokens are drawn from: temperature, then top-k, then top-p, then min-p.

    Top-p keeps the smallest set, most likely first, whose mass is at least ``top_p`` of what top-k left over. Min-p
    then drops what is less than ``min_p`` times as likely as the likeliest token. Temperature 0 is a one-hot row. A row
    in which every token is forbidden (-inf) is one-hot at id 0, as :func:`argmax_lowest` has it.

    Args:
        logits: [num_rows, vocab_size] of any float dtype, already penalised; never modified.
        params: only temperature, top_k, top_p and min_p are used.

    Returns:
        [num_rows, vocab_size], float32, each row sums to 1; on the device of the logits.

    Raises:
        ModelFormatError: a row holds NaN.
    """
    if params.is_greedy:
        return _one_hot(argmax_lowest(logits), logits)
    probs = _softmax(logits, params.temperature)
    if not _has_filters(params, probs.shape[-1]):
        return probs
    if probs.device.type != "cpu":
        return _filter_by_sorting(probs, params)
    filtered = np.zeros(probs.shape, dtype=np.float32)
    for row, target in zip(probs.numpy(), filtered, strict=True):
        kept_ids = _kept_ids(row, params)
        kept = row[kept_ids].astype(np.float64)
        target[kept_ids] = kept / kept.sum()
    return torch.from_numpy(filtered)


def to_probs_by_sorting(logits: Tensor, params: SamplingParams) -> Tensor:
    """The oracle of :func:`to_probs`: the same contract by a full stable sort of every row in plain torch."""
    if params.is_greedy:
        return _one_hot(argmax_lowest(logits), logits)
    return _filter_by_sorting(_softmax(logits, params.temperature), params)


def logprobs_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log-probability of one token per row and of the row's ``num_top`` likeliest.

    Args:
        logits: [num_rows, vocab_size], as the target computed them: before penalties and temperature.
        token_ids: one per row.
        num_top: how many alternatives to name, 0 for none; most likely first, the lower id first on a tie.
    """
    assert len(token_ids) == logits.shape[0]
    if not token_ids:
        return []
    rows = as_array(logits)  # [num_rows, vocab_size]
    rows = rows - rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return [
        TokenLogprob(token_id, float(row[token_id]), _top(row, num_top))
        for row, token_id in zip(rows, token_ids, strict=True)
    ]


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.detach().float()
    # float32 has no room for temperatures beyond these, and the distribution no use for the difference.
    temperature = min(max(temperature, torch.finfo(torch.float32).tiny), torch.finfo(torch.float32).max)
    if logits.device.type == "cpu":
        return torch.from_numpy(_softmax_rows(logits, np.float32(temperature)))
    row_max = logits.amax(dim=-1, keepdim=True)  # [num_rows, 1]
    if not bool(torch.isfinite(row_max).all()):
        logits = _with_finite_maxima(logits)
        row_max = logits.amax(dim=-1, keepdim=True)
    return torch.softmax((logits - row_max).div_(temperature), dim=-1)


def _softmax_rows(logits: Tensor, temperature: np.float32) -> npt.NDArray[np.float32]:
    rows = logits.numpy()  # [num_rows, vocab_size]
    row_max = rows.max(axis=-1, keepdims=True)
    if not np.isfinite(row_max).all():
        rows = _with_finite_maxima(logits).numpy()
        row_max = rows.max(axis=-1, keepdims=True)
    weights: npt.NDArray[np.float32] = rows - row_max  # first, so that no quotient is too large: the largest is 0
    with np.errstate(over="ignore"):  # far below the maximum, -inf is the right answer
        weights /= temperature
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def _with_finite_maxima(logits: Tensor) -> Tensor:
    """A copy in which a forced row (+inf) allows just the forced tokens, and an empty one (all -inf) token 0."""
    row_max = logits.amax(dim=-1)  # [num_rows]
    _refuse_nan(bool(torch.isnan(row_max).any()))
    logits = logits.clone()
    is_forced = row_max == torch.inf
    logits[is_forced] = torch.where(logits[is_forced] == torch.inf, 0.0, -torch.inf)
    logits[row_max == -torch.inf, 0] = 0.0
    return logits


def _refuse_nan(has_nan: bool) -> None:
    if has_nan:
        raise ModelFormatError("the model produced logits that are not numbers (NaN); try another dtype or checkpoint")


def _one_hot(token_ids: Tensor, logits: Tensor) -> Tensor:
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return probs.scatter_(-1, token_ids.unsqueeze(-1), 1.0)


def _has_filters(params: SamplingParams, vocab_size: int) -> bool:
    return _has_top_k(params, vocab_size) or params.top_p < 1.0 or params.min_p > 0.0


def _has_top_k(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size


def _kept_ids(row: Row, params: SamplingParams) -> npt.NDArray[np.intp]:
    """The ids that survive the filters, ascending. ``row``: [vocab_size] probabilities before filtering."""
    kept_ids = np.arange(row.size)
    if _has_top_k(params, row.size) or params.top_p < 1.0:
        head = _head(row, params)
        kept_ids = np.flatnonzero(row >= head[-1])
        num_excess = kept_ids.size - head.size
        if num_excess > 0:  # more tokens are as likely as the last one kept than there is room for
            tied = np.flatnonzero(row[kept_ids] == head[-1])
            kept_ids = np.delete(kept_ids, tied[-num_excess:])
    if params.min_p > 0.0:
        kept_ids = kept_ids[row[kept_ids] >= row.max() * np.float32(params.min_p)]
    return kept_ids


def _head(row: Row, params: SamplingParams) -> Row:
    """The probabilities, descending, of exactly the tokens that top-k and top-p keep."""
    has_top_k = _has_top_k(params, row.size)
    head = row
    for cutoff in _CUTOFFS:
        head = row[row >= cutoff]
        if has_top_k and head.size >= params.top_k:
            break
        # The margin covers the rounding of this sum, which adds in another order than the one that decides below.
        if not has_top_k and float(head.sum(dtype=np.float64)) > params.top_p + 1e-9:
            break
    head = np.sort(head)[::-1]
    if has_top_k:
        head = head[: params.top_k]
    if params.top_p == 1.0:
        return head
    mass = np.cumsum(head, dtype=np.float64)  # one after the other, so a longer head begins with the same sums
    total = mass[-1] if has_top_k else 1.0
    return head[: 1 + int(np.count_nonzero(mass[:-1] < params.top_p * total))]


def _filter_by_sorting(probs: Tensor, params: SamplingParams) -> Tensor:
    vocab_size = probs.shape[-1]
    has_top_k = _has_top_k(params, vocab_size)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)  # [num_rows, vocab_size]
    is_kept = torch.ones_like(ordered, dtype=torch.bool)
    if has_top_k:
        is_kept[:, params.top_k :] = False
    if params.top_p < 1.0:
        mass = (ordered.double() * is_kept).cumsum(dim=-1)
        total = mass[:, -1:] if has_top_k else torch.ones_like(mass[:, -1:])
        is_kept[:, 1:] &= mass[:, :-1] < params.top_p * total
    if params.min_p > 0.0:
        is_kept &= ordered >= ordered[:, :1] * params.min_p
    kept = torch.zeros_like(probs).scatter_(-1, order, ordered * is_kept).double()
    return (kept / kept.sum(dim=-1, keepdim=True)).float()


def _top(row: Row, num_top: int) -> dict[int, float]:
    if num_top == 0:
        return {}
    num_top = min(num_top, row.size)
    threshold = np.partition(row, row.size - num_top)[row.size - num_top]
    candidates = np.flatnonzero(row >= threshold)
    likeliest = candidates[np.argsort(-row[candidates], kind="stable")][:num_top]  # candidates ascend, so ties do too
    return {int(token_id): float(row[token_id]) for token_id in likeliest}
