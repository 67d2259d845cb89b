"""Read the calls of one block in each of the six shapes.

A reading pauses while text is missing, and raises NotACall where the text is no call. Until then, the calls of the
block take the text that is certain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from radixkv.chat.calls.block import Block
from radixkv.chat.calls.source import NotACall, Reading, Source, first_literal
from radixkv.chat.calls.values import (
    JSON,
    PYTHON,
    Dialect,
    Take,
    as_json,
    escaped,
    string,
    typed,
    types_of,
    value,
)

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_IDS = ("id", "tool_call_id")


def read_block(block: Block) -> Reading[None]:
    """Read the calls of a block, and the text that ends it. O(characters)."""
    read = {"json": _objects, "python": _python}.get(block.form.shape, _headed)
    yield from read(block)
    yield from _end(block.source, block.form.end)


def _end(source: Source, tag: str) -> Reading[None]:
    """Read the tag that ends a call or a block; it may be missing, or cut off at the end of the reply."""
    tag = tag.strip()
    if not tag:
        return
    if (yield from source.follows(tag, gap=True)):
        source.at += len(tag)
    elif source.final and tag.startswith(source.text[source.at :].strip()):
        source.at = len(source.text)


# ---- JSON objects


def _objects(block: Block) -> Reading[None]:
    source, form = block.source, block.form
    first = yield from source.space()
    if first == "[":
        source.at += 1
        found = ","
        while found == ",":
            yield from _object(block)
            found = yield from source.next(",", "]")
    elif first != "{" and form.head:
        yield from _headed(block)
    else:
        yield from _object(block)
        while form.end and block.tag and (yield from source.follows("{", gap=True)):
            yield from _object(block)


def _object(block: Block) -> Reading[None]:
    yield from block.source.next("{")
    block.begin()
    yield from _members(block)
    block.close()


def _members(block: Block, *, inner: bool = False) -> Reading[None]:
    """Read the members of an object that is a call, or of its `inner` object with name and arguments.

    Arguments under another name than the format's are passed on at the end, in case that both follow.
    """
    source, others, unknown = block.source, list[str](), False
    found = yield from source.space()
    source.at += found == "}"
    while found != "}":
        key = yield from string(source)
        yield from source.next(":")
        first = yield from source.space()
        if block.form.entry.startswith("{NAME"):
            if not block.empty:
                raise NotACall
            block.name = key
            yield from _arguments(source, block.take)
        elif key in _NAMES and first == '"' and not block.name:
            block.name = yield from string(source)
        elif key == "function" and first == "{" and not inner:
            source.at += 1
            yield from _members(block, inner=True)
        elif key in _ARGUMENTS and block.empty:
            others = []
            yield from _arguments(source, block.take if f'"{key}"' in block.form.entry else others.append)
        elif key in _IDS and first == '"':
            block.own_id = yield from string(source)
        else:
            unknown |= first == "{"
            yield from value(source, lambda _: None, JSON)
        found = yield from source.next(",", "}")
    if block.empty:
        if unknown and not others:
            raise NotACall
        block.take("".join(others))


def _arguments(source: Source, take: Take) -> Reading[None]:
    """Read an object, or its JSON text in a string; `null`, an empty array and an empty text are no arguments."""
    first = yield from source.space()
    if first == "{":
        yield from value(source, take, JSON)
        return
    if first == '"':
        text = as_json((yield from string(source)).strip() or "{}", JSON)
    else:
        pieces: list[str] = []
        yield from value(source, pieces.append, JSON)
        text = "{}" if "".join(pieces) in ("null", "[]") else None
    if text is None or not text.startswith("{"):
        raise NotACall
    take(text)


# ---- a head with the name, then arguments


def _headed(block: Block) -> Reading[None]:
    source, form = block.source, block.form
    again = first_literal(form.head)
    while True:
        words = yield from source.pattern(form.head)
        block.begin(words["name"], form.own_id.format_map({"id": "", **words}))
        yield from _tagged_body(block) if form.shape == "tags" else _object_body(block)
        block.close()
        yield from _end(source, form.tail)
        if not again or not (yield from source.follows(again, gap=True)):
            return


def _object_body(block: Block) -> Reading[None]:
    """Read arguments as an object: in JSON, or with bare keys and quotes of the format."""
    if (yield from block.source.space()) != "{":
        raise NotACall
    quote = block.form.quote
    yield from value(block.source, block.take, Dialect((quote,), own=True) if quote else JSON)


def _tagged_body(block: Block) -> Reading[None]:
    """Read arguments in tags; the call is certain once the first one or the end follows."""
    source, form = block.source, block.form
    begins, ends = first_literal(form.argument), [tag.strip() for tag in (form.tail, form.end) if tag.strip()]
    before = "{"
    while (found := (yield from source.follows(begins, *ends, gap=True))) == begins:
        words = yield from source.pattern(form.argument.rstrip())
        block.take(f"{before}{json.dumps(words['key'], ensure_ascii=False)}: ")
        yield from _argument(block, words)
        before = ", "
    if not found or (before == "{" and form.head.strip() == "{name}" and block.name not in block.tools):
        raise NotACall  # any word in tags
    block.take("{}" if before == "{" else "}")


def _argument(block: Block, words: Mapping[str, str]) -> Reading[None]:
    """Read a value up to its closing tag; a string is passed on as it arrives."""
    source, form = block.source, block.form
    if form.argument.endswith("\n") and (yield from source.follows("\n")):
        source.at += 1
    types = _types(block, words)
    if types == {"string"}:
        block.take('"')
        yield from source.until(form.closings, lambda text: block.take(escaped(text)))
        block.take('"')
        return
    pieces: list[str] = []
    yield from source.until(form.closings, pieces.append)
    block.take(typed("".join(pieces), types))


def _types(block: Block, words: Mapping[str, str]) -> frozenset[str]:
    """Return the types of an argument: as its tag says, or else as the schema of the tool says."""
    if "string" in words:
        return frozenset({"string"} if words["string"] == "true" else {"any"})
    if "type" in words:
        return frozenset({words["type"]})
    match block.tools.get(block.name, {}).get("parameters"):
        case {"properties": {**properties}} as whole:
            return types_of(properties.get(words["key"]), whole)
    return frozenset()


# ---- Python calls


def _python(block: Block) -> Reading[None]:
    source = block.source
    if (yield from source.space()) == "[":
        source.at += 1
    while True:
        yield from source.space()
        block.begin((yield from source.word("(")))
        yield from source.skip("(")
        yield from _keywords(block)
        block.close()
        found = yield from source.follows(",", "]", gap=True)
        source.at += len(found)
        if found == "]" or not (found or (yield from _another(source, block.form.end))):
            return


def _another(source: Source, end: str) -> Reading[bool]:
    """Whether another call follows in a list without brackets."""
    return bool(end) and not (yield from source.follows(end.strip(), gap=True)) and not source.final


def _keywords(block: Block) -> Reading[None]:
    source = block.source
    block.take("{")
    found = yield from source.space()
    source.at += found == ")"
    before = ""
    while found != ")":
        yield from source.space()
        key = yield from source.word("=")
        yield from source.next("=")
        block.take(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from value(source, block.take, PYTHON)
        found = yield from source.next(",", ")")
        before = ", "
    block.take("}")
