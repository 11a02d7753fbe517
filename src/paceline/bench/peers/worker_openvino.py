"""OpenVINO GenAI. Run by the peer's own Python, see worker_protocol.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

_MAX_NGRAM_SIZE = 3
_WARM_UP_TOKENS = 16


class OpenVino:
    """Finds earlier prompts in its prefix cache, block by block."""

    def load(
        self, *, model: str, num_threads: int, lookup_tokens: int, precision: str | None, weights: str
    ) -> dict[str, Any]:
        """``lookup_tokens`` is the length of prompt lookup drafts; 0 decodes plainly."""
        self._numpy = importlib.import_module("numpy")
        self._openvino = importlib.import_module("openvino")
        self._genai = genai = importlib.import_module("openvino_genai")
        self._model, self._lookup_tokens = model, lookup_tokens
        self._properties = {"INFERENCE_NUM_THREADS": num_threads, "PERFORMANCE_HINT": "LATENCY"}
        if precision:
            self._properties["INFERENCE_PRECISION_HINT"] = precision

        class Streamer(genai.StreamerBase):  # type: ignore[misc, name-defined]
            def __init__(self, recorder: Any) -> None:
                super().__init__()
                self._recorder = recorder

            def write(self, tokens: Any) -> Any:
                is_done = self._recorder.add([tokens] if isinstance(tokens, int) else list(tokens))
                return genai.StreamingStatus.STOP if is_done else genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        self._streamer = Streamer
        self._make()
        return {"weights": weights, "version": str(genai.__version__)}

    def reset(self) -> None:
        """The prefix cache cannot be emptied, so the pipeline is made anew, and warmed up."""
        self._make()

    def generate(self, token_ids: list[int], recorder: Any) -> int:
        """See worker_protocol.py. How much of the prompt was cached is not reported: 0."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = recorder.max_tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.stop_token_ids = set(recorder.end_token_ids)
        if self._lookup_tokens:
            config.num_assistant_tokens = self._lookup_tokens
            config.max_ngram_size = _MAX_NGRAM_SIZE
        ids = self._numpy.array([token_ids], dtype=self._numpy.int64)
        inputs = self._genai.TokenizedInputs(
            self._openvino.Tensor(ids), self._openvino.Tensor(self._numpy.ones_like(ids))
        )
        result = self._pipeline.generate(inputs, config, self._streamer(recorder))
        if not recorder.is_done:  # an end token may be withheld from the streamer
            recorder.add([int(token_id) for token_id in result.tokens[0]][len(recorder.token_ids) :])
        return 0

    def _make(self) -> None:
        self._pipeline: Any = None  # the old one's memory goes first
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        lookup = {"prompt_lookup": True} if self._lookup_tokens else {}
        self._pipeline = self._genai.LLMPipeline(
            self._model, "CPU", scheduler_config=scheduler, **lookup, **self._properties
        )
        recorder = importlib.import_module("worker_protocol").Recorder(8, [], 0.0)
        self.generate(list(range(1, 1 + _WARM_UP_TOKENS)), recorder)  # too short to fill a block that is kept


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    importlib.import_module("worker_protocol").serve(OpenVino())
