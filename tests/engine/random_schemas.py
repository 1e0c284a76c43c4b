"""Random JSON schemas of moderate size, whose texts cannot grow without bound."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["name", "size", "état", "a b", "x-1", "日本", "tags", "id", "kind"]


def random_schema(seed: int) -> dict[str, Any]:
    """An object with a few members, two or three levels deep."""
    draw = random.Random(seed)
    schema = _object(draw, 3)
    schema["$defs"] = {"leaf": _leaf(draw), "pair": _object(draw, 1)}
    return schema


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or draw.random() < 0.45:
        return _leaf(draw)
    kinds = [_object, _array, lambda d, n: {"anyOf": [_any(d, n - 1), _leaf(d)]}]
    if depth > 1:
        kinds.append(lambda d, n: {"$ref": f"#/$defs/{d.choice(['leaf', 'pair'])}"})
    return draw.choice(kinds)(draw, depth)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    schema = {"type": "array", "items": _any(draw, depth - 1), "minItems": least, "maxItems": least + 1}
    if draw.random() < 0.3:
        schema["prefixItems"] = [_leaf(draw)]
    return schema


def _leaf(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    return draw.choice(
        [
            {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 8)},
            {"type": "string", "pattern": "^[a-z]{1,4}(-[0-9]{2})?$"},
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 10},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"enum": draw.sample(["red", "grün", 'a "b"', 7, -1.5, None, True], 3)},
            {"const": draw.choice([12, "fix", False])},
        ]
    )
