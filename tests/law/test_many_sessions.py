"""Two thousand sessions, of which many run at once, share one index of answers that is far too small for them."""

from __future__ import annotations

import random
from pathlib import Path

from paceline import Engine, Output, SamplingParams, Speculation
from paceline.spec.ladder import Ladder
from paceline.spec.suffix import CorpusLookup, SuffixLookup

NUM_SESSIONS, NUM_AT_ONCE = 2000, 16
INDEX_TOKENS = 256  # some twenty answers


def test_eviction_breaks_no_running_request(tiny_checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    dice = random.Random(5)
    prompts = [[2 + (j * (i + 3)) % 60 for j in range(10)] for i in range(60)]
    corpus = CorpusLookup(INDEX_TOKENS)
    sizes: list[int] = []
    accepted = 0
    with Engine(tiny_checkpoint, draft=None, max_model_len=64) as engine:
        engine.core.ladder = Ladder([SuffixLookup(), corpus])
        expected = [engine.generate(prompt, params, speculation=Speculation("off")).token_ids for prompt in prompts]
        running: dict[str, int] = {}
        num_started = num_ended = 0
        while num_ended < NUM_SESSIONS:
            while num_started < NUM_SESSIONS and len(running) < NUM_AT_ONCE:
                # Most sessions ask what was asked lately, so that there is something to find, and to lose.
                number = min(len(prompts) - 1, int(dice.expovariate(0.1)))
                speculation = Speculation("static", 4, drafters=("suffix", "corpus"))
                request_id = engine.submit(prompts[number], params, speculation=speculation, session=engine.session())
                running[request_id] = number
                num_started += 1
            engine.step()
            for request_id, output in _ended(engine, list(running)):
                assert output.token_ids == expected[running.pop(request_id)]
                accepted += output.speculation.accepted_by_source.get("corpus", 0)
                sizes.append(corpus.num_bytes)
                num_ended += 1
        engine.core.cache.check_integrity()
    assert accepted > NUM_SESSIONS
    assert max(sizes) == max(sizes[:200])  # full after some twenty, and no larger ever after


def _ended(engine: Engine, request_ids: list[str]) -> list[tuple[str, Output]]:
    return [
        (request_id, delta.output)
        for request_id in request_ids
        for delta in engine.take(request_id)
        if delta.output is not None
    ]
