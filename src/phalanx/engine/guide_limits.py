"""Bounds on the guides that strangers send: what would take llguidance long, or too deep, is refused before.

Measured: a schema's time grows with the square of an object's properties; intersections of regular expressions grow by
powers of two, past any of its own bounds.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_BYTES = 128 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 1000
MAX_INTERSECTIONS = 8
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"')
_EMBEDDED = re.compile(r"%json\s*(?=[{\[])")


def check_size(text: str) -> None:
    """Raises ValueError for a text that is too long or not Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("a guide's text holds half a character, which cannot be encoded") from None
    if size > MAX_BYTES:
        raise ValueError(f"a guide's text may have {MAX_BYTES} bytes, given {size}")


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deep: {MAX_DEPTH} levels are allowed") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None


def check_schema(schema: Any) -> None:
    """Raises ValueError for a JSON schema that is no object, or beyond the bounds."""
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, given {json.dumps(schema)[:40]}")
    patterns = intersections = 0
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        dicts = [node for node in level if isinstance(node, dict)]
        for node in dicts:
            if len(node) > MAX_PROPERTIES:
                raise ValueError(f"an object of the JSON schema has {len(node)} members: {MAX_PROPERTIES} are allowed")
            patterns += "pattern" in node
            patterns += len(node["patternProperties"]) if isinstance(node.get("patternProperties"), dict) else 0
            intersections += "allOf" in node
        level = [child for node in dicts for child in node.values()] + [
            child for node in level if isinstance(node, list) for child in node
        ]
        level = [node for node in level if isinstance(node, (dict, list))]
        if not level:
            break
    else:
        raise ValueError(f"the JSON schema is nested too deep: {MAX_DEPTH} levels are allowed")
    if intersections and patterns > MAX_INTERSECTIONS:
        raise ValueError(f"a JSON schema with allOf may have {MAX_INTERSECTIONS} patterns, given {patterns}")


def check_grammar(text: str) -> None:
    """Raises ValueError for a grammar of Lark that is beyond the bounds, embedded JSON schemas included."""
    decoder = json.JSONDecoder()
    for match in _EMBEDDED.finditer(text):
        try:
            schema, _ = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            raise ValueError(f"the grammar's %json at character {match.start()} is not followed by JSON") from None
        check_schema(schema)
    operators = _QUOTED.sub('""', text)
    count = operators.count("&") + operators.count("~")
    if count > MAX_INTERSECTIONS:
        raise ValueError(f"a grammar may have {MAX_INTERSECTIONS} of the operators & and ~, given {count}")
