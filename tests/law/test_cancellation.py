"""Requests cancelled at random moments leave no block behind."""

from __future__ import annotations

import random
from pathlib import Path

from paceline import Engine, SamplingParams, Speculation


def test_500_cancellations(tiny_checkpoint: Path) -> None:
    coins = random.Random(0)
    with Engine(
        tiny_checkpoint,
        draft=tiny_checkpoint,
        block_size=4,
        max_num_batched_tokens=48,
        max_num_seqs=6,
        max_model_len=256,
    ) as engine:
        cache = engine.core.cache
        assert cache.num_free_blocks == engine.info.num_blocks
        alive: list[str] = []
        num_submitted = num_cancelled = 0
        while num_cancelled < 500:
            if len(alive) < 12:
                prompt = [coins.randrange(2, 64) for _ in range(coins.choice((1, 3, 17, 60, 120)))]
                params = SamplingParams(max_tokens=coins.randrange(1, 60), temperature=coins.choice((0.0, 1.0)))
                mode = Speculation(coins.choice(("off", "static", "dynamic")), coins.randrange(1, 9))
                alive.append(engine.submit(prompt, params, speculation=mode))
                num_submitted += 1
            if coins.random() < 0.5:
                engine.step()
                finished = [r for r in alive if any(d.output is not None for d in engine.take(r))]
                alive = [request_id for request_id in alive if request_id not in finished]
            if alive and coins.random() < 0.7:
                engine.cancel(alive.pop(coins.randrange(len(alive))))
                num_cancelled += 1
                cache.check_integrity()
        for request_id in alive:
            engine.cancel(request_id)
        cache.check_integrity()
        assert cache.num_free_blocks == engine.info.num_blocks
        assert not cache.owners
        assert not engine.step()

        # Nothing is left to hinder a request that needs every block.
        whole = engine.info.num_blocks * engine.info.block_size
        assert whole >= 256
        filler = [engine.submit([2] * 250, SamplingParams(max_tokens=5, ignore_eos=True)) for _ in range(6)]
        while engine.step():
            pass
        assert all(engine.take(request_id)[-1].output is not None for request_id in filler)


def test_a_request_of_the_whole_pool_runs_after_others_left(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, draft=None) as engine:
        bytes_per_block = engine.info.kv_bytes // engine.info.num_blocks
    with Engine(tiny_checkpoint, draft=None, max_model_len=128, kv_memory_bytes=8 * bytes_per_block) as engine:
        assert engine.info.num_blocks == 8
        for step in range(20):
            request_id = engine.submit([3 + step] * 30, SamplingParams(max_tokens=50))
            for _ in range(step % 4):
                engine.step()
            engine.cancel(request_id)
        output = engine.generate([9] * 100, SamplingParams(max_tokens=28, ignore_eos=True))
        assert output.usage.completion_tokens == 28
        assert output.kv.peak_blocks_used == 8
