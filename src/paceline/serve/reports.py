"""What an answer says about itself beside text: usage, timings, speculation, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.engine.output import Output
from paceline.loader.tokenizer import Tokenizer
from paceline.records import TokenLogprob
from paceline.request import Speculation


def openai_usage(outputs: Iterable[Output], *, num_predicted: int = 0, num_prompts: int = 1) -> dict[str, Any]:
    """Usage of a request with one or more choices; a prompt that several choices share counts once.

    ``num_predicted`` is the number of tokens of the client's ``prediction``; those that no choice accepted count as
    rejected. Drafts from other sources are not part of these two numbers.
    """
    done = list(outputs)
    prompts = done[:: max(1, len(done) // num_prompts)] if done else []
    num_prompt = sum(output.usage.prompt_tokens for output in prompts)
    num_completion = sum(output.usage.completion_tokens for output in done)
    num_accepted = sum(output.speculation.accepted_by_source.get("prediction", 0) for output in done)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.usage.cached_tokens for output in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": num_accepted if num_predicted else 0,
            "rejected_prediction_tokens": max(0, num_predicted * len(done) - num_accepted) if num_predicted else 0,
        },
    }


def timings(output: Output) -> dict[str, Any]:
    """Times of one generation under llama.cpp's names."""
    usage, timing = output.usage, output.timing
    num_read = usage.prompt_tokens - usage.cached_tokens
    num_predicted = usage.completion_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": num_read,
        "prompt_ms": timing.ttft_ms,
        "prompt_per_token_ms": timing.ttft_ms / num_read if num_read else 0.0,
        "prompt_per_second": 1e3 * num_read / timing.ttft_ms if timing.ttft_ms else 0.0,
        "predicted_n": num_predicted,
        "predicted_ms": timing.decode_ms,
        "predicted_per_token_ms": timing.decode_ms / num_predicted if num_predicted else 0.0,
        "predicted_per_second": timing.decode_tokens_per_s,
        "draft_n": output.speculation.num_draft_tokens,
        "draft_n_accepted": output.speculation.num_accepted_draft_tokens,
    }


def metrics(output: Output, speculation: Speculation) -> dict[str, Any]:
    """Speculation of one generation under the names benchmarks read; the histogram has an entry for every length."""
    report = output.speculation
    num_spec_tokens = 0 if speculation.mode == "off" else speculation.max_tokens
    histogram = list(report.acceptance_histogram)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": report.mean_acceptance_length,
            "draft_acceptance_rate": report.draft_acceptance_rate,
            "acceptance_histogram": [*histogram, *[0] * (num_spec_tokens + 1 - len(histogram))],
            "num_spec_steps": report.num_spec_steps,
            "num_accepted_draft_tokens": report.num_accepted_draft_tokens,
            "num_draft_tokens": report.num_draft_tokens,
            "num_spec_tokens": num_spec_tokens,
            "mean_horizon": report.mean_horizon,
            "horizon_histogram": list(report.horizon_histogram),
            "calibration_error": report.calibration_error,
            "accepted_by_source": dict(report.accepted_by_source),
            "drafted_by_source": dict(report.drafted_by_source),
        }
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries of ``choices[].logprobs.content``."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    return [
        {
            **one(entry.token_id, entry.logprob),
            "top_logprobs": [one(token_id, logprob) for token_id, logprob in entry.top.items()],
        }
        for entry in entries
    ]


class CompletionLogprobs:
    """``choices[].logprobs`` of /v1/completions; remembers where in the text it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def first(self, token_id: int) -> dict[str, Any]:
        """The prompt's first token, which nothing precedes: no log-probability."""
        text = self._text(token_id)
        self._offset += len(text)
        return {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}

    def entries(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """The next tokens."""
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = self._text(entry.token_id)
            result["tokens"].append(text)
            result["token_logprobs"].append(max(entry.logprob, -9999.0))
            top = {self._text(token_id): max(logprob, -9999.0) for token_id, logprob in entry.top.items()}
            result["top_logprobs"].append({**top, text: max(entry.logprob, -9999.0)})
            result["text_offset"].append(self._offset)
            self._offset += len(text)
        return result

    def _text(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def join_logprobs(parts: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Several pieces of completion logprobs as one."""
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            joined[name] += values
    return joined
