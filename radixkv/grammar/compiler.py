"""Compile the constraints of an engine's requests, on a thread of its own.

A constraint is compiled while its request waits outside the engine's thread, so that no step waits for it. The latest
grammars are kept, and apart from them the latest refusals. The owners of requests take turns, so that a constraint
never waits for all constraints of another owner. Requests with one grammar share its automaton, which grows as their
texts use it. What a grammar may cost is limited: its size here, the work of one token by llguidance's limits. Grammars
that break a limit with their first tokens are refused; a later one ends its request, and the next request compiles the
constraint again.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from radixkv.errors import EngineClosed, InvalidConstraint
from radixkv.grammar.constraint import MISSING, grammar_of
from radixkv.grammar.json_schema import refusal, subschemas
from radixkv.grammar.matcher import GrammarMatcher, TokenTable, reason_of
from radixkv.sampling.params import Constraint, SamplingParams

Result = TypeVar("Result")
_STACK = 2**28  # bytes of the compiler's stack: it recurses over references and rules, and an overflow ends the process
_MOST_GRAMMARS = 32
_MOST_REFUSALS = 256
_PROBED_TOKENS = 4
_MOST_TRIES = 50  # parts of a refused schema that are compiled alone
_MOST_SECONDS = 0.3  # after which no further part is
_END = "<|radixkv: the end|>"
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 100_000,  # 100 MB at most; a text of 20,000 characters with maxLength takes 90,000
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Default limits allow 2 to 10 times as much; with these, no hostile grammar that we found takes more than a second."""


@dataclass(frozen=True)
class Refusal:
    """The reason why a constraint was refused."""

    message: str
    parameter: str | None
    place: str | None
    worn = False  # refused again without another look

    def error(self) -> InvalidConstraint:
        """Return the error to raise, a new one for each caller."""
        return InvalidConstraint(self.message, parameter=self.parameter, place=self.place)


Compiled = GrammarMatcher | Refusal
_STARTING = threading.Lock()


class GrammarCompiler:
    """Make the matchers of one engine's requests. Any thread may call it."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, stop_ids: Collection[int]) -> None:
        """Compile for a transformers tokenizer; `vocab_size` is the number of logits, `stop_ids` end a reply.

        Nothing is imported or built before it is needed.
        """
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, frozenset(stop_ids)
        self._table: TokenTable | None = None
        self._grammars: OrderedDict[Constraint, Future[Compiled]] = OrderedDict()  # the latest ones
        self._held: weakref.WeakValueDictionary[Constraint, Future[Compiled]] = weakref.WeakValueDictionary()
        self._refusals: OrderedDict[bytes, Future[Compiled]] = OrderedDict()
        self._waiting: OrderedDict[Hashable, deque[Callable[[], None]]] = OrderedDict()  # the next owner first
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, "radixkv-grammar")
        self._pid = os.getpid()

    def begin(self, params: SamplingParams, owner: Hashable = None) -> Future[Compiled] | None:
        """Start to compile the constraint of `params`, unless it is compiled already; None without a constraint.

        Owners with waiting constraints take turns; a constraint that several owners wait for has the first of their
        turns. A constraint is compiled once as long as its future is referenced; of those without a reference only the
        latest are compiled. The future never raises InvalidConstraint: `matcher` does. Raises EngineClosed in a forked
        process, which lacks the thread that compiles.
        """
        constraint = params.constraint
        if constraint is None:
            return None
        if os.getpid() != self._pid:
            raise EngineClosed(f"this engine belongs to process {self._pid}: load another one after the fork")
        with self._lock:
            found = self._held.get(constraint) or self._refusals.get(_digest(constraint))
            if found is None or (found.done() and found.result().worn):
                found = self._held[constraint] = Future()
            if not found.done():
                self._start(found, lambda: self._compiled(constraint), owner)
            if constraint in self._held:
                _put(self._grammars, constraint, found, _MOST_GRAMMARS)
        return found

    def matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        """Wait for the constraint of `params`, and return a matcher at the start of a reply; None without a constraint.

        Raises InvalidConstraint.
        """
        compiling = self.begin(params)
        if compiling is None:
            return None
        compiled = compiling.result()
        if isinstance(compiled, Refusal):
            raise compiled.error()
        return compiled.fork()

    def prepare(self) -> None:
        """Build the tokenizer's table now; the first constraint does it otherwise.

        Costs a second of a CPU for 49,152 tokens, during which no other thread of Python runs. Raises InvalidConstraint
        without llguidance, or if the model has no tokenizer that it can read.
        """
        self._start(built := Future[TokenTable](), self._built_table, None)
        built.result()

    def _start(self, future: Future[Result], work: Callable[[], Result], owner: Hashable) -> None:
        """Give the result of `work` to a future, when it is the owner's turn, unless it has one or is gone by then.

        The compiler's thread starts with the first work.
        """
        held = weakref.ref(future)

        def run() -> None:
            future = held()
            if future is not None and not future.done():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

        with self._lock:
            self._waiting.setdefault(owner, deque()).append(run)
        with _STARTING:  # the size holds for all threads that start meanwhile; untouched pages cost no memory
            usual = threading.stack_size(_STACK)
            try:
                self._thread.submit(self._run_next)
            finally:
                threading.stack_size(usual)

    # ---- on the compiler's thread

    def _run_next(self) -> None:
        """Run the oldest work of the owner whose turn it is."""
        with self._lock:
            owner, works = self._waiting.popitem(last=False)
            work = works.popleft()
            if works:
                self._waiting[owner] = works
        work()

    def _compiled(self, constraint: Constraint) -> Compiled:
        try:
            return self._compile(constraint)
        except InvalidConstraint as error:  # not kept itself: its traceback holds the grammar
            refused = Refusal(str(error), error.parameter, error.place)
        with self._lock:
            self._grammars.pop(constraint, None)
            self._held.pop(constraint, None)
            _put(self._refusals, _digest(constraint), Future(), _MOST_REFUSALS).set_result(refused)
        return refused

    def _compile(self, constraint: Constraint) -> GrammarMatcher:
        table, name = self._built_table(), constraint.parameter
        grammar = grammar_of(constraint)
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(table.tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise _refusal(constraint, matcher.get_error())
        compiled = GrammarMatcher(matcher, table, name)
        for share in (0.0, 0.5, 1.0):
            _probe(compiled.fork(), name, share)
        return compiled

    def _built_table(self) -> TokenTable:
        if self._table is None:
            self._table = _table(self._tokenizer, self._vocab_size, self._stop_ids)
        return self._table


def _put(kept: OrderedDict[Any, Future[Result]], key: Any, future: Future[Result], most: int) -> Future[Result]:
    """Keep a future as the latest, in place of the oldest one if there are more than `most`; return it."""
    kept[key] = future
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
    return future


def _digest(constraint: Constraint) -> bytes:
    return blake2b(repr(constraint).encode(), digest_size=16).digest()


def _probe(matcher: GrammarMatcher, name: str, share: float) -> None:
    """Follow some tokens, so that a grammar that is too expensive is refused; and the automaton gets its start.

    `share` selects one of the allowed tokens: 0 is the first, 1 the last.
    """
    bits, stops = np.empty((1, -(-matcher.vocab_size // 32)), np.int32), list(matcher.stop_ids)
    for number in range(_PROBED_TOKENS):
        for error in GrammarMatcher.fill([matcher], bits).values():
            raise error
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_)
        flags[stops] = False
        allowed = np.flatnonzero(flags)
        if not len(allowed):
            if number == 0:
                raise InvalidConstraint(f"{name} allows no text", parameter=name)
            return
        matcher.consume([int(allowed[int(share * (len(allowed) - 1))])])
        matcher.consume(matcher.forced())
        if matcher.finished:
            return


def _refusal(constraint: Constraint, error: str) -> InvalidConstraint:
    """Return the error for a constraint that llguidance refuses, with the place in a schema if it can be found."""
    if constraint.parameter == "json_schema":
        schema = json.loads(constraint.value)  # type: ignore[arg-type]
        return refusal(_place(schema), reason_of(error))
    return InvalidConstraint(f"{constraint.parameter}: {reason_of(error)}", parameter=constraint.parameter)


def _place(schema: Any) -> str:
    """Return a JSON pointer to the innermost part of a schema that is refused alone with the same error.

    Compiles some parts alone, for a limited time; empty for the whole schema.
    """
    end = time.monotonic() + _MOST_SECONDS
    shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    error, place, tries = _alone(schema, shared), "", _MOST_TRIES
    inner = list(subschemas(schema))
    while error and inner and tries and time.monotonic() < end:
        tries -= 1
        name, part = inner.pop(0)
        if _alone(part, shared) == error:
            place, inner = place + name, list(subschemas(part)) if isinstance(part, Mapping) else []
    return place


def _alone(schema: Any, shared: Mapping[str, Any]) -> str:
    """Return the error of a part of a schema without the rest; empty for none."""
    from llguidance import LLMatcher, LLParserLimits

    if isinstance(schema, bool):
        return ""
    try:
        grammar = grammar_of(Constraint("json_schema", json.dumps({**shared, **schema})))
    except InvalidConstraint:
        return ""
    error = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**_LIMITS))
    return reason_of(error) if error else ""


def _table(tokenizer: Any | None, vocab_size: int, stop_ids: frozenset[int]) -> TokenTable:
    try:
        from llguidance import LLExecutor, LLTokenizer
    except ImportError as error:
        raise InvalidConstraint(MISSING) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidConstraint(
            "constrained replies need a tokenizer of the tokenizers library, and this model has none: "
            "load it with tokenizer="
        )
    backend = type(backend).from_str(backend.to_str())  # a copy
    backend.no_padding()
    backend.no_truncation()
    ends = sorted(stop_ids)
    if not ends:  # llguidance needs one; the masks of requests without stop tokens leave it out
        backend.add_special_tokens([_END])
        ends = [backend.token_to_id(_END)]
    size = max(vocab_size, *(token + 1 for token in backend.get_vocab().values()))
    try:
        built = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
    except ValueError as error:
        raise InvalidConstraint(f"llguidance cannot read this model's tokenizer: {error}") from error
    return TokenTable(built, LLExecutor(), size, frozenset(ends))
