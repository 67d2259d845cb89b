"""The kinds of settings: which values each takes, the form in which it stores them, and its words for wrong ones."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from radixkv.durations import parse_duration
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_size import parse_bytes

INT64 = (-(2**63), 2**63 - 1)  # the integers that HTTP clients may send


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Take every value, and store it unchanged.

    message    the error for a wrong value, with {name}, {value} and the {kind}, whose `allowed` says what is right
    optional   whether None is a value
    metavar    the word for the value in the help of a command; without one, it is the option's name
    """

    message: str = "{name} must be {kind.allowed}, not {value!r:.100}"
    optional: bool = False
    metavar: str | None = None
    parse: ClassVar[Callable[[str], Any]] = str
    """Read a value of the command line."""

    def accepts(self, value: Any) -> bool:
        """Whether a value that is not None is right."""
        return True

    def checked(self, name: str, value: Any) -> Any:
        """Return the value as it is stored; raise InvalidInput for a wrong one."""
        if (value is not None or not self.optional) and not self.accepts(value):
            raise InvalidInput(self.message.format(name=name, value=value, kind=self))
        return value


@dataclass(frozen=True, kw_only=True)
class Rule(Kind):
    """Take the values that pass a test."""

    test: Callable[[Any], bool]

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return self.test(value)


@dataclass(frozen=True, kw_only=True)
class Flag(Kind):
    """Take True and False."""

    message: str = "{name} must be True or False, got {value!r}"

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Switch(Flag):
    """Take a value for its truth."""

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return True


@dataclass(frozen=True, kw_only=True)
class Number(Kind):
    """Take finite numbers from `low` to `high`; `above` excludes `low`. HTTP clients may go to `wire_high` only."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    wire_high: float | None = None
    metavar: str | None = "S"
    parse: ClassVar[Callable[[str], Any]] = float

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return is_number(value) and self.low <= value <= self.high and not (self.above and value == self.low)

    @property
    def allowed(self) -> str:
        """The range in words."""
        limit = "" if self.high == math.inf else f" and <= {self.high:g}"
        return f"a number {'>' if self.above else '>='} {self.low:g}{limit}"

    @property
    def wire(self) -> tuple[float, float]:
        """The range of HTTP clients."""
        return self.low, self.high if self.wire_high is None else self.wire_high


@dataclass(frozen=True, kw_only=True)
class Integer(Number):
    """Take ints."""

    metavar: str | None = "N"
    parse: ClassVar[Callable[[str], Any]] = int

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return is_int(value) and self.low <= value <= self.high

    @property
    def allowed(self) -> str:
        """The range in words."""
        if self.low == -math.inf:
            return "an int or None" if self.optional else "an int"
        limits = f">= {self.low}" if self.high == math.inf else f"from {self.low} to {self.high}"
        return f"{'None or ' if self.optional else ''}an int {limits}"

    @property
    def wire(self) -> tuple[int, int]:
        """The range of HTTP clients, within the integers of 64 bits."""
        low, high = super().wire
        return int(max(low, INT64[0])), int(min(high, INT64[1]))


@dataclass(frozen=True, kw_only=True)
class OneOf(Kind):
    """Take the members of a list, which are texts and flags."""

    message: str = "{name}={value!r}: allowed are {kind.allowed}"
    members: tuple[Any, ...]

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return isinstance(value, str | bool) and value in self.members

    @property
    def allowed(self) -> str:
        """The members in words."""
        return ", ".join(map(repr, (*self.members, None) if self.optional else self.members))


@dataclass(frozen=True, kw_only=True)
class Text(Kind):
    """Take texts of 1 to `most` characters that are valid Unicode."""

    allowed: ClassVar[str] = "a text"
    most: float = math.inf

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return isinstance(value, str) and value != ""

    def checked(self, name: str, value: Any) -> Any:
        """See Kind."""
        checked = super().checked(name, value)
        return checked if checked is None else encodable(name, short_enough(name, checked, self.most))


@dataclass(frozen=True, kw_only=True)
class FilePath(Kind):
    """Take the name of a file or folder."""

    optional: bool = True
    metavar: str | None = "FILE"

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return isinstance(value, str | os.PathLike) and os.fspath(value) != ""


@dataclass(frozen=True, kw_only=True)
class Size(Kind):
    """Take numbers of bytes, or sizes such as "8GiB"; with `automatic` also "auto". They are stored as given."""

    metavar: str | None = "SIZE"
    automatic: bool = True

    def checked(self, name: str, value: Any) -> Any:
        """See Kind."""
        if not (value is None and self.optional) and not (value == "auto" and self.automatic):
            parse_bytes(value, name, automatic=self.automatic)
        return value


@dataclass(frozen=True, kw_only=True)
class Bytes(Number):
    """Take sizes, and store them as numbers of bytes."""

    metavar: str | None = "SIZE"
    parse: ClassVar[Callable[[str], Any]] = str

    def checked(self, name: str, value: Any) -> Any:
        """See Kind."""
        return super().checked(name, parse_bytes(value, name, automatic=False) if isinstance(value, str) else value)


@dataclass(frozen=True, kw_only=True)
class Duration(Kind):
    """Take durations such as 90s or 5m, and store seconds; a negative one is infinite."""

    metavar: str | None = "DURATION"

    def checked(self, name: str, value: Any) -> float:
        """See Kind."""
        return parse_duration(value, name)


@dataclass(frozen=True, kw_only=True)
class Texts(Kind):
    """Take a list of texts that are not empty, or a single text; store a tuple, which is empty for None.

    At most `most` texts with `longest` characters together. HTTP clients may send `wire_most` texts of at most
    `wire_longest` characters.
    """

    allowed: ClassVar[str] = "a string or a list of strings, none of them empty"
    message: str = "{name} must be {kind.allowed}, not {value!r}"
    most: float = math.inf
    longest: float = math.inf
    wire_most: int = 0
    wire_longest: int = 0

    def accepts(self, value: Any) -> bool:
        """See Kind."""
        return isinstance(value, Sequence) and all(isinstance(text, str) and text for text in value)

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
        """See Kind."""
        texts = (value,) if isinstance(value, str) else () if value is None else value
        texts = tuple(super().checked(name, texts))
        if len(texts) > self.most:
            raise InvalidInput(f"{name} has {len(texts)} texts: at most {self.most} are allowed")
        if self.longest < math.inf:
            encodable(name, short_enough(name, "".join(texts), self.longest))
        return texts


@dataclass(frozen=True, kw_only=True)
class TokenIds(Kind):
    """Take a list of token ids, and store a tuple, which is empty for None."""

    def checked(self, name: str, value: Any) -> tuple[int, ...]:
        """See Kind."""
        if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset | None):
            raise InvalidInput(f"{name} must be a list of token ids, not {value!r}")
        if not all(is_int(token) and token >= 0 for token in value or ()):
            raise InvalidInput(f"{name} must be ints >= 0, not {value!r}")
        return tuple(value or ())


@dataclass(frozen=True, kw_only=True)
class TokenBias(Number):
    """Take a mapping of token ids to numbers from `low` to `high`, and store a copy, which is empty for None."""

    def checked(self, name: str, value: Any) -> dict[int, float]:
        """See Kind."""
        if not isinstance(value, Mapping | None):
            raise InvalidInput(f"{name} must map token ids to numbers, not be a {type(value).__name__}")
        for token, bias in (value or {}).items():
            if not is_int(token) or token < 0 or not self.accepts(bias):
                limits = f"from {self.low:g} to {self.high:g}"
                raise InvalidInput(f"{name} must map token ids to numbers {limits}, not {token!r} to {bias!r}")
        return dict(value or {})


@dataclass(frozen=True, kw_only=True)
class Named(Kind):
    """Take a mapping of names to values, and store a copy, which is empty for None."""

    def checked(self, name: str, value: Any) -> dict[str, Any]:
        """See Kind."""
        if not isinstance(value, Mapping | None) or not all(isinstance(each, str) for each in value or ()):
            raise InvalidInput(f"{name} must map names to values, not be {value!r:.100}")
        return dict(value or {})


@dataclass(frozen=True, kw_only=True)
class JsonSchema(Text):
    """Take a JSON schema: a mapping, its JSON text, or True for any JSON value."""

    def checked(self, name: str, value: Any) -> str | None:
        """Return compact JSON text with the keys in their order, which is the order of the reply's properties."""
        if value is None:
            return None
        try:
            if isinstance(value, str):
                value = json.loads(short_enough(name, value, self.most))
            if value is not True and not isinstance(value, Mapping):
                words = "a mapping, its JSON text, or True for any value"
                raise InvalidInput(f"{name} must be {words}, not {value!r:.100}")
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
        except InvalidInput:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"{name} is no JSON: {json_reason(error)}") from error
        return encodable(name, short_enough(name, text, self.most))


def json_reason(error: Exception) -> str:
    """Return why a text is no JSON; a reader of Python's message about long numbers cannot change that limit."""
    limit = sys.get_int_max_str_digits()
    return f"a whole number has more than {limit} digits" if "integer string conversion" in str(error) else str(error)


def short_enough(name: str, text: str, most: float) -> str:
    """Return a text; raise InvalidInput if it is longer than `most` characters."""
    if len(text) > most:
        raise InvalidInput(f"{name} has {len(text)} characters: at most {most} are allowed")
    return text


def encodable(name: str, text: str) -> str:
    """Return a text; raise InvalidInput if it is no valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{name} is no valid Unicode: {error}") from error
    return text


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite int or float, and not a bool."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False
