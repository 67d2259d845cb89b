"""Constraints that would cost much time or memory if they were compiled, or followed."""

from __future__ import annotations

import json
from typing import Any


def schema_of_bombs(count: int) -> dict[str, Any]:
    """Return an intersection with 4 ** count cases."""
    digits = [{"const": number} for number in range(4)]
    return {"allOf": [{"anyOf": [{"properties": {f"k{at}": digit}} for digit in digits]} for at in range(count)]}


def references(count: int) -> dict[str, Any]:
    """Return objects that require each other, so that no finite value is valid."""
    names = [f"d{at}" for at in range(count)]
    links = {at: {f"p{by}": {"$ref": f"#/$defs/d{(7 * at + by) % count}"} for by in range(10)} for at in range(count)}
    defs = {
        name: {"type": "object", "properties": links[at], "required": list(links[at])} for at, name in enumerate(names)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs}


def patterns(count: int) -> dict[str, Any]:
    """Return objects that extend each other, each with a pattern for the same property."""
    own = [{"properties": {"a": {"type": "string", "pattern": f"x{at}"}}} for at in range(count)]
    defs = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}, each]} for at, each in enumerate(own)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": True}}


def chained(count: int, *, nested: bool) -> dict[str, Any]:
    """Return a schema of references that lead to each other in a row."""
    references = [{"$ref": f"#/$defs/d{at + 1}"} for at in range(count)]
    links = [{"properties": {"a": each}, "required": ["a"]} if nested else each for each in references]
    names = [f"d{at}" for at in range(count + 1)]
    return {"$ref": "#/$defs/d0", "$defs": dict(zip(names, [*links, {"type": "integer"}], strict=True))}


HOSTILE: dict[str, dict[str, Any]] = {
    "10^6 choices": {"choice": [*map(str, range(10**6))]},
    "10^6 values": {"json_schema": {"enum": list(range(10**6))}},
    "100,000 values in parts": {
        "json_schema": {"anyOf": [{"enum": list(range(n, n + 100))} for n in range(0, 20000, 100)]}
    },
    "a long schema": {"json_schema": {"description": "x" * 10**6}},
    "deep text": {"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "deep schema": {"json_schema": json.loads('{"items":' * 200 + "{}" + "}" * 200)},
    "a product of cases": {"json_schema": schema_of_bombs(6)},
    "references without an end": {"json_schema": references(300)},
    "many optional properties": {
        "json_schema": {"properties": {f"p{at}": True for at in range(900)}, "type": "object"}
    },
    "a large divisor in a grammar": {"grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'},
    "repeated repetition": {"regex": "((a{100}){100}){100}"},
    "many required names": {"json_schema": {"type": "object", "required": [f"r{at}" for at in range(20_000)]}},
    "a long constant": {"json_schema": {"const": list(range(30_000))}},
    "a constant of long texts": {"json_schema": {"const": ["x" * 25] * 9000}},
    "many patterns of one text": {"json_schema": {"allOf": [{"pattern": f"x{at}"} for at in range(40)]}},
    "many patterns by references": {"json_schema": patterns(40)},
    "references in a row": {"json_schema": chained(5000, nested=False)},
    "objects in a row": {"json_schema": chained(2500, nested=True)},
    "many rules in GBNF": {"grammar": "root ::= r0\n" + "\n".join(f"r{at} ::= r{at + 1}" for at in range(9000))},
    "long repetition": {"regex": "a{1000000}"},
    "exponential rules": {
        "grammar": "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)) + '\nr40: "a"'
    },
    "many nullable rules": {"grammar": "start: " + " ".join(["x?"] * 2000) + '\nx: "a"'},
    "intersected automata": {"grammar": "start: T\nT: /.*a.{15}/ & /.*b.{15}/ & ~/.*c.{12}/"},
    "overlapping patterns": {
        "json_schema": {"type": "object", "patternProperties": {f"a.*{n}": True for n in range(40)}}
    },
}
