"""Hugging Face transformers. Run by the peer's own Python, see worker_protocol.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


class _Streamer:
    """Hands each step's tokens to the recorder; the first call brings the prompt."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self._recorder.add(value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        pass


class Transformers:
    """Hands the last conversation's K/V to ``generate`` again, cropped to the longest common prefix."""

    def load(self, *, model: str, num_threads: int, lookup_tokens: int, dtype: str, weights: str) -> dict[str, Any]:
        """``lookup_tokens`` is the length of prompt lookup drafts; 0 decodes plainly."""
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(num_threads)
        self._transformers = transformers = importlib.import_module("transformers")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(self._torch, dtype)).eval()
        # With prompt lookup `generate` reads the whole prompt on top of what the cache holds already, and answers
        # otherwise; a cache of a sliding window cannot be cropped.
        self._can_keep = not lookup_tokens and getattr(self._model.config, "sliding_window", None) is None
        self._lookup = {"prompt_lookup_num_tokens": lookup_tokens} if lookup_tokens else {}
        self.reset()
        return {"weights": weights, "version": str(transformers.__version__)}

    def reset(self) -> None:
        """See worker_protocol.py."""
        self._cache: Any = None
        self._cached_ids: list[int] = []

    def generate(self, token_ids: list[int], recorder: Any) -> int:
        """See worker_protocol.py."""
        num_cached = self._keep_common_prefix(token_ids)
        ids = self._torch.tensor([token_ids])
        ends = sorted(recorder.end_token_ids)
        with self._torch.inference_mode():
            sequence = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                past_key_values=self._cache,
                do_sample=False,
                max_new_tokens=recorder.max_tokens,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                streamer=_Streamer(recorder),
                **self._lookup,
            )
        self._cached_ids = sequence[0].tolist()[: self._cache.get_seq_length()]
        return num_cached

    def _keep_common_prefix(self, token_ids: list[int]) -> int:
        """Crop the cache to what it shares with the prompt, but for the prompt's last token; how much that is."""
        pairs = zip(self._cached_ids, token_ids[:-1], strict=False)
        common = next((i for i, (kept, wanted) in enumerate(pairs) if kept != wanted), None)
        if common is None:
            common = min(len(self._cached_ids), len(token_ids) - 1)
        if not self._can_keep or not common:
            self.reset()
            self._cache = self._transformers.DynamicCache(config=self._model.config)
            return 0
        if surplus := self._cache.get_seq_length() - common:
            self._cache.crop(-surplus)
        return common


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    importlib.import_module("worker_protocol").serve(Transformers())
