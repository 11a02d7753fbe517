"""The part of the target's vocabulary that a trained draft speaks, and what its logits mean in target ids.

A small draft spends most of its time in the head, and a few thousand tokens cover nearly all code (FR-Spec, arXiv
2502.14856). Exactness costs nothing: a distribution over the listed tokens is one over all of them with probability 0
elsewhere, and verification takes any distribution as long as it is the one that was drawn from (law 4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ModelFormatError

# Where the draft itself expects, more likely than not, a token it cannot name, drafting on is a waste.
_OUTSIDE_THRESHOLD = 0.5


class DraftVocabulary:
    """Which target token each logit of a draft stands for.

    ``token_ids`` ascend, so that the lowest of equal logits is the lowest token id. With ``has_escape`` one more logit
    follows: the probability that the next token is none of those listed.

    Raises:
        ModelFormatError: ids that do not ascend, or none.
    """

    def __init__(self, token_ids: Sequence[int], *, has_escape: bool) -> None:
        self.token_ids = torch.tensor(token_ids, dtype=torch.int64)
        if not token_ids or token_ids[0] < 0 or bool((self.token_ids.diff() <= 0).any()):
            raise ModelFormatError("the token ids of a draft vocabulary must ascend from 0 or more")
        self._token_ids = self.token_ids.numpy()
        self.has_escape = has_escape

    @property
    def num_tokens(self) -> int:
        """How many target tokens are listed."""
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        """The height of the draft's head."""
        return self.num_tokens + self.has_escape

    def scatter(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits in target ids: ``logits`` [num_rows, num_logits] to [num_rows, vocab_size], -inf where not listed.

        The escape logit is left out, which renormalises the rest: what is sampled is always a listed token.
        """
        listed = logits[:, : self.num_tokens]
        if logits.device.type == "cpu":  # by numpy: so little work is not worth waking a thread pool for
            rows = np.full((logits.shape[0], vocab_size), -np.inf, dtype=np.float32)
            rows[:, self._token_ids] = listed.detach().float().numpy()
            return torch.from_numpy(rows)
        full = torch.full((logits.shape[0], vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
        return full.index_copy_(1, self.token_ids.to(logits.device), listed)

    def likeliest(self, logits: Tensor) -> int:
        """The target id of the largest listed logit, the lowest of equals. ``logits``: [num_logits]."""
        listed = logits[: self.num_tokens].detach().float().cpu().numpy()
        return int(self._token_ids[listed.argmax()])

    def expects_outside(self, logits: Tensor) -> bool:
        """Whether the next token is more likely than not an unlisted one. ``logits``: [num_logits].

        It looks at no sampled token, so stopping for it leaves every distribution as it is.
        """
        if not self.has_escape:
            return False
        row = logits.detach().float().cpu().numpy()
        most = row.max()
        if row[-1] < most:  # as a rule; then it cannot be more likely than not
            return False
        weights = np.exp(row - most)
        return bool(weights[-1] > _OUTSIDE_THRESHOLD * weights.sum())
