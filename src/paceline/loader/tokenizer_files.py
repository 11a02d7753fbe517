"""The tokenizer's files in a Hugging Face folder and which of them wins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import ModelFormatError
from paceline.loader.safetensors import read_json


class TokenizerFiles:
    """tokenizer.json, and what its companions say where present.

    Raises:
        ModelFormatError: tokenizer.json is missing, or any of the files is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFormatError(
                f"{folder} has no tokenizer.json; make one with transformers' AutoTokenizer and save_pretrained"
            )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelFormatError(f"{path} is damaged ({error}); fetch the model folder again") from error
        self.config = self._optional("tokenizer_config.json")
        self._specials = self._optional("special_tokens_map.json")

    def _optional(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return read_json(path) if path.is_file() else {}

    def token_id(self, role: str) -> int | None:
        """The id of the token in a role such as ``eos_token``, or None when the files name none."""
        named = self.config.get(role, self._specials.get(role))
        text = named.get("content") if isinstance(named, Mapping) else named
        return self.backend.token_to_id(text) if isinstance(text, str) else None

    def eos_token_ids(self) -> set[int]:
        """Every id that ends a turn: the tokenizer's own and those of generation_config.json (else config.json)."""
        ends = {
            token_id for token_id in (self.token_id("eos_token"), self.token_id("eot_token")) if token_id is not None
        }
        for name in ("generation_config.json", "config.json"):
            listed = self._optional(name).get("eos_token_id")
            if listed is not None:
                ends.update(listed if isinstance(listed, list) else [listed])
                break
        return ends

    def chat_template(self) -> str | None:
        """The Jinja source: chat_template.jinja first, as in transformers, else the config's (its default one)."""
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
            template = named.get("default")
        return template if isinstance(template, str) else None
