"""Write a constraint as a grammar of llguidance.

JSON is written as Python's json.dumps writes it: one space after a colon and after a comma, and no other white space.
Models have seen this form most often. It leaves no choice between members, so that names and punctuation are forced
tokens, and no reply can run into endless white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from radixkv.errors import InvalidConstraint
from radixkv.grammar.json_schema import checked_schema
from radixkv.sampling.params import Constraint
from radixkv.settings.kinds import json_reason

MISSING = "constrained replies need llguidance: pip install 'radixkv[grammar]'"
SEPARATORS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
MOST_GBNF_RULES = 1_000  # the converter takes O(n * n)
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_EMBEDDED = re.compile(r"%json\s*(?=[{])")


def installed() -> bool:
    """Whether llguidance is installed. It is not imported."""
    return find_spec("llguidance") is not None


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of a constraint, in the JSON form of llguidance. Raises InvalidConstraint."""
    return json.dumps({"grammars": [_WRITERS[constraint.parameter](constraint.value)]}, ensure_ascii=False)


def schema_with_separators(schema: Any) -> dict[str, Any]:
    """Check a JSON schema, and return it with the separators of a reply.

    Its JSON text may follow `%json` in a grammar. Raises InvalidConstraint with the place of a keyword that cannot be
    enforced.
    """
    checked = checked_schema(schema)
    return {**checked, "x-guidance": {**SEPARATORS, **checked.get("x-guidance", {})}}


def embedded(constraint: Constraint) -> str:
    """Return an expression for a constraint, to be a part of another grammar.

    Its schemas are checked when that grammar is compiled. Raises InvalidConstraint for a regular expression.
    """
    name, value = constraint
    match name:
        case "json_schema":
            return f"%json {'{}' if value == 'true' else value}"
        case "regex":
            return f"/{_lark_regex(str(value))}/"
        case "choice":
            return " | ".join(map(quoted, value))
    return f"%lark {{\n{_as_lark(str(value))}\n}}"


def _lark_regex(text: str) -> str:
    try:
        from llguidance import regex_to_lark
    except ImportError as error:
        raise InvalidConstraint(MISSING) from error
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise InvalidConstraint("regex ends with a backslash that escapes nothing", parameter="regex")
    # "dw": digits and word characters are ASCII, as in the patterns of JSON Schema.
    return str(regex_to_lark(text, "dw"))


def _as_lark(grammar: str) -> str:
    """Return a grammar in Lark's notation, which may be in GBNF, the notation of llama.cpp."""
    if _GBNF.search(grammar) is None:
        return grammar
    if (rules := len(_GBNF.findall(grammar))) > MOST_GBNF_RULES:
        message = f"grammar has {rules} rules: at most {MOST_GBNF_RULES} are allowed in GBNF, more in Lark's notation"
        raise InvalidConstraint(message, parameter="grammar")
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError as error:
        raise InvalidConstraint(MISSING) from error
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter raises plain Exceptions
        raise InvalidConstraint(f"grammar: {error}", parameter="grammar") from error


_WRITERS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "json_schema": lambda text: {"json_schema": schema_with_separators(json.loads(text))},
    "regex": lambda text: {"lark_grammar": f"start: REPLY\nREPLY: /{_lark_regex(text)}/\n"},
    "grammar": lambda text: {"lark_grammar": _checked_lark(_as_lark(text))},
    "choice": lambda texts: {"lark_grammar": "start: REPLY\nREPLY: " + " | ".join(map(quoted, texts))},
}


def quoted(text: str) -> str:
    """Return a text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # Lark refuses this character


def _checked_lark(grammar: str) -> str:
    """Return a grammar whose embedded schemas are checked, and have the separators of a reply unless they set them."""
    parts, at = [], 0
    while (found := _EMBEDDED.search(grammar, at)) is not None:
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            line = grammar.count("\n", 0, found.start()) + 1
            raise InvalidConstraint(
                f"grammar, line {line}: no JSON after %json: {json_reason(error)}", parameter="grammar"
            ) from error
        parts += [grammar[at : found.end()], json.dumps(schema_with_separators(schema), ensure_ascii=False)]
        at = end
    return "".join([*parts, grammar[at:]])
