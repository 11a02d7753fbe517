"""Speaks the workers' protocol without an engine. Its behaviour is the argument; run by the tests of the peers."""

from __future__ import annotations

import json
import os
import sys
import time

behaviour = sys.argv[1]
cached: list[int] = []
for line in sys.stdin:
    request = json.loads(line)
    answer: dict[str, object] = {"id": request["id"]}
    if behaviour == "babbling":
        print("loading tensors: 42%\n{not json\n[1, 2]\n" + json.dumps({"id": -1, "token_ids": [9]}), flush=True)
    if request["op"] == "load":
        if behaviour == "refusing":
            answer["error"] = "RuntimeError: no such model"
        answer |= {"weights": "fake", "version": "1.0"}
    elif request["op"] == "reset":
        cached = []
    elif request["op"] == "generate":
        is_turn = bool(request["end_token_ids"])  # the warm-up has none
        if is_turn and behaviour == "dying":
            print("Traceback\nIllegalInstruction: sorry", file=sys.stderr, flush=True)
            os._exit(3)
        while is_turn and behaviour in ("hanging", "babbling without end"):
            if behaviour == "hanging":
                time.sleep(60)
            print("still thinking", flush=True)
        prompt = request["token_ids"]
        common = next(
            (i for i, pair in enumerate(zip(cached, prompt, strict=False)) if pair[0] != pair[1]), len(cached)
        )
        cached = list(prompt)
        token_ids = [5, 6, 7, 8][: request["max_tokens"]]
        answer |= {"token_ids": token_ids, "num_cached_tokens": min(common, len(prompt)), "peak_rss_mib": 12.0}
        answer["steps"] = [[10.0, 1], [14.0, 3]] if len(token_ids) == 4 else [[10.0, len(token_ids)]]
        if is_turn and behaviour == "miscounting":
            answer["steps"] = [[10.0, 1]]
    print(json.dumps(answer), flush=True)
