"""Thirty schemas through a server that listens, with the embedded model and the official client."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from paceline import AsyncEngine
from tests.serve.running import Running, running_server

TEXT = {"type": "string", "maxLength": 40}
WORD = {"type": "string", "pattern": "^[a-z]{2,12}$"}
SMALL = {"type": "integer", "minimum": 0, "maximum": 120}
PROPERTIES: list[dict[str, Any]] = [
    {"name": TEXT, "age": SMALL},
    {"file": WORD, "line": SMALL, "is_serious": {"type": "boolean"}},
    {"title": TEXT, "tags": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 4}},
    {
        "language": {"enum": ["python", "rust", "go"]},
        "stars": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    },
    {"date": {"type": "string", "format": "date"}, "reason": TEXT},
    {
        "point": {
            "type": "array",
            "items": {"type": "number", "multipleOf": 0.25, "maximum": 9},
            "minItems": 2,
            "maxItems": 2,
        }
    },
    {"person": {"$ref": "#/$defs/person"}, "friend": {"$ref": "#/$defs/person"}},
    {"answer": {"anyOf": [WORD, SMALL, {"type": "null"}]}, "why": TEXT},
    {"edits": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/edit"}}},
    {
        "id": {"type": "string", "format": "uuid"},
        "kind": {"const": "event"},
        "note": {"type": "string", "maxLength": 15},
    },
]
DEFINITIONS = {
    "person": {"type": "object", "properties": {"name": WORD, "age": SMALL}, "required": ["name", "age"]},
    "edit": {"type": "object", "properties": {"old": WORD, "new": WORD}, "required": ["old", "new"]},
}
for one in DEFINITIONS.values():
    one["additionalProperties"] = False
SCHEMAS = [
    {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }
    for properties in PROPERTIES
]
PROMPTS = ["Make something up.", "Describe a bug in a web server.", "Tell me about Ada Lovelace."]


@pytest.fixture(scope="module")
def running(embedded_model_path: Path) -> Iterator[Running]:
    with running_server(AsyncEngine(embedded_model_path, max_model_len=2048)) as server:
        yield server


@pytest.mark.long
@pytest.mark.embedded
def test_thirty_schemas(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for index, (schema, prompt) in enumerate((schema, prompt) for schema in SCHEMAS for prompt in PROMPTS):
        sampling: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
        response_format: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
        messages: Any = [{"role": "user", "content": f"{prompt} Answer in JSON: {', '.join(schema['properties'])}."}]
        texts = []
        for speculative in (True, False):
            answer = client.chat.completions.create(
                model="m",
                messages=messages,
                response_format=response_format,
                max_completion_tokens=400,
                extra_body={"speculative": speculative},
                **sampling,
            )
            choice = answer.choices[0]
            assert choice.finish_reason == "stop"
            assert choice.message.content is not None
            assert jsonschema_rs.is_valid(schema, json.loads(choice.message.content)), choice.message.content
            texts.append(choice.message.content)
            assert answer.model_extra is not None
            report = answer.model_extra["metrics"]["speculative_decoding"]
            drafted.update(report["drafted_by_source"])
            accepted.update(report["accepted_by_source"])
        assert texts[0] == texts[1]
    assert accepted["grammar"] >= 0.98 * drafted["grammar"] > 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert running.engine.load.num_used_blocks == 0
