"""What an answer must look like, as the clients of OpenAI, vLLM and llama.cpp ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import GrammarError, InvalidParameterError
from paceline.request import StructuredOutput
from paceline.serve.errors import ApiError, not_supported
from paceline.serve.served import ServedEngine


@dataclass(frozen=True, slots=True)
class Structure:
    """A structured output, and the field that asked for it."""

    output: StructuredOutput
    field: str


def one_structure(asked: Mapping[str, StructuredOutput | None]) -> Structure | None:
    """The one that is asked for among several fields; None where there is none.

    Raises:
        ApiError: 400, there are two.
    """
    found = [Structure(output, field) for field, output in asked.items() if output is not None]
    if len(found) > 1:
        names = " and ".join(structure.field for structure in found)
        raise ApiError(400, f"the answer can have one structure, but {names} ask for several", param=found[1].field)
    return found[0] if found else None


def response_format(field: str, value: Mapping[str, Any] | None) -> StructuredOutput | None:
    """OpenAI's ``response_format``, and ``text.format`` of its Responses; llama.cpp's schema beside the type as well.

    Raises:
        ApiError: 400, an unknown type, or a type that needs a schema without one.
    """
    kind = "text" if value is None else value.get("type", "text")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return StructuredOutput.json_object() if schema is None else json_schema(field, schema)
    if kind != "json_schema":
        raise not_supported(f"{field} {str(kind)[:40]!r}", field)
    holder = value.get("json_schema", value)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if schema is None:
        raise ApiError(400, f"{field} of type json_schema needs a schema", param=field)
    return json_schema(field, schema)


def structured_outputs(value: Mapping[str, Any]) -> StructuredOutput | None:
    """vLLM's ``structured_outputs``: one of json, json_object, regex, choice and grammar.

    Raises:
        ApiError: 400, none of them, several, or one that is malformed.
    """
    field = "structured_outputs"
    if value.get("structural_tag") is not None:
        raise not_supported("structured_outputs.structural_tag", field)
    structure = one_structure(
        {
            f"{field}.json": json_schema(field, value.get("json")),
            f"{field}.json_object": StructuredOutput.json_object() if value.get("json_object") else None,
            f"{field}.regex": StructuredOutput.regex(_text(field, value["regex"])) if value.get("regex") else None,
            f"{field}.choice": choice(field, value.get("choice")),
            f"{field}.grammar": StructuredOutput.grammar(_text(field, value["grammar"]))
            if value.get("grammar")
            else None,
        }
    )
    if value and structure is None:
        raise ApiError(400, f"{field} needs one of json, json_object, regex, choice and grammar", param=field)
    return structure.output if structure is not None else None


def json_schema(field: str, schema: Any) -> StructuredOutput | None:
    """A JSON schema, as an object or as text.

    Raises:
        ApiError: 400, it is neither.
    """
    if schema is None:
        return None
    if not isinstance(schema, Mapping | str):
        raise ApiError(400, f"the schema of {field} must be an object", param=field)
    try:
        return StructuredOutput.json_schema(schema)
    except InvalidParameterError as error:
        raise ApiError(400, str(error), param=field) from None


def choice(field: str, options: Any) -> StructuredOutput | None:
    """A list of texts, one of which is the answer.

    Raises:
        ApiError: 400, it is no such list.
    """
    if options is None:
        return None
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ApiError(400, f"the choice of {field} must be a list of strings", param=field)
    try:
        return StructuredOutput.choice(options)
    except InvalidParameterError as error:
        raise ApiError(400, str(error), param=field) from None


async def compile_structure(engine: ServedEngine, structure: Structure, max_bytes: int) -> None:
    """Compile a structure before the request that needs it begins.

    Raises:
        ApiError: 413, it is longer than the server allows; 400, it cannot be compiled.
    """
    size = len(structure.output.text.encode("utf-8", "replace"))
    if size > max_bytes:
        message = f"{structure.field} takes {size} bytes, more than the {max_bytes} allowed for a grammar or schema"
        raise ApiError(413, message, param=structure.field)
    try:
        await engine.compile_grammar(structure.output)
    except GrammarError as error:
        raise ApiError(400, str(error), param=structure.field, code="invalid_grammar") from None


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ApiError(400, f"{field}: a regex or a grammar must be a string", param=field)
    return value
