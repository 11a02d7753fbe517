"""llama.cpp through llama-cpp-python. Run by the peer's own Python, see worker_protocol.py."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from typing import Any


class LlamaCpp:
    """Keeps the last conversation's KV cache and reuses its longest common prefix, as the library does by itself."""

    def load(
        self, *, model: str, num_threads: int, context_length: int, lookup_tokens: int, weights: str
    ) -> dict[str, Any]:
        """``lookup_tokens`` is the length of prompt lookup drafts; 0 decodes plainly."""
        self._module = importlib.import_module("llama_cpp")
        lookup = {}
        if lookup_tokens:
            drafting = importlib.import_module("llama_cpp.llama_speculative")
            lookup = {"draft_model": drafting.LlamaPromptLookupDecoding(num_pred_tokens=lookup_tokens)}
        self._llama = self._module.Llama(
            model,
            n_ctx=context_length,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            logits_all=bool(lookup_tokens),
            verbose=False,
            **lookup,
        )
        self._eval_sizes: list[int] = []
        evaluate = self._llama.eval

        def counted(tokens: Any) -> None:
            self._eval_sizes.append(len(tokens))
            evaluate(tokens)

        self._llama.eval = counted  # a step is one call of it, however many drafts it accepts
        return {"weights": weights, "version": str(self._module.__version__)}

    def reset(self) -> None:
        """See worker_protocol.py."""
        self._llama.reset()
        self._llama._ctx.kv_cache_clear()

    def generate(self, token_ids: list[int], recorder: Any) -> int:
        """See worker_protocol.py."""
        self._eval_sizes.clear()
        num_seen = 0
        for token_id in self._llama.generate(token_ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            is_new_step, num_seen = len(self._eval_sizes) > num_seen, len(self._eval_sizes)
            if recorder.add([token_id], is_new_step=is_new_step):
                break
        return len(token_ids) - self._eval_sizes[0]

    def quantize(self, *, source: str, target: str, file_type: str) -> None:
        """Write ``source`` in another format, also if it is quantised already."""
        module = importlib.import_module("llama_cpp")
        params = module.llama_model_quantize_default_params()
        params.ftype = getattr(module, f"LLAMA_FTYPE_MOSTLY_{file_type}")
        params.allow_requantize = True
        if status := module.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    importlib.import_module("worker_protocol").serve(LlamaCpp())
