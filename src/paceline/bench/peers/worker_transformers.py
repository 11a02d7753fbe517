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
    """Reads every prompt anew: ``generate`` keeps no cache from one call to the next."""

    def load(self, *, model: str, num_threads: int, lookup_tokens: int, dtype: str, weights: str) -> dict[str, Any]:
        """``lookup_tokens`` is the length of prompt lookup drafts; 0 decodes plainly."""
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(num_threads)
        transformers = importlib.import_module("transformers")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(self._torch, dtype)).eval()
        self._lookup = {"prompt_lookup_num_tokens": lookup_tokens} if lookup_tokens else {}
        return {"weights": weights, "version": str(transformers.__version__)}

    def reset(self) -> None:
        """Nothing is kept."""

    def generate(self, token_ids: list[int], recorder: Any) -> int:
        """See worker_protocol.py."""
        ids = self._torch.tensor([token_ids])
        ends = sorted(recorder.end_token_ids)
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=recorder.max_tokens,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                streamer=_Streamer(recorder),
                **self._lookup,
            )
        return 0


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    importlib.import_module("worker_protocol").serve(Transformers())
