"""Which prompt tokens hit, by the rules of other engines in a model of their caches, and by radixkv's own caches.

Every policy sees the same requests one at a time, with KV memory for all of them and the same slots for states. Rows of
running requests are not counted. The rules of others differ in where they keep a state:

  every block   after each 16 tokens (vLLM's mode `all`, with the KV block of other models).
  align         after each 528 tokens, the block that vLLM's mode `align` needs for Qwen3.5-4B.
  node ends     at the end of each prompt and of each reply, one for each node of the tree (SGLang's MambaRadixCache).
  node ends +   at multiples of 64 before the end of a prompt and before the point where texts branch, and after each
                256 tokens of a reply (SGLang with `extra_buffer`).

A model of a cache knows states by the node of a trie that they follow. The least recently used state is evicted; a hit
refreshes the state that it used alone. KV of a prompt and of its reply, except for the last token, is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hybrid_parts.workloads import Ask

from radixkv.cache import PrefixCache

BLOCK, CHUNK = 16, 512
OURS, BOUND = "radixkv", "attention_only"


class Text(NamedTuple):
    """A request as a path in the trie: its nodes, the length of its prompt, and of the part that has cached KV."""

    nodes: list[int]
    prompt: int
    matched: int


class Replay(NamedTuple):
    """The tokens of each prompt that hit, and the tokens of all prompts."""

    hits: list[int]
    tokens: int

    @property
    def rate(self) -> float:
        """The share of prompt tokens that hit."""
        return sum(self.hits) / self.tokens

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return self.tokens - sum(self.hits)


def paths(asks: Iterable[Ask]) -> list[Text]:
    """Return the requests as paths in one trie. O(tokens)."""
    trie: dict[tuple[int, int], int] = {}
    found = []
    for ask in asks:
        nodes, node, known = [], -1, len(trie)
        for token in [*ask.prompt.tolist(), *ask.reply[:-1].tolist()]:
            node = trie.setdefault((node, token), len(trie))
            nodes.append(node)
        prompt = len(ask.prompt)
        matched = next((at for at, each in enumerate(nodes[:prompt]) if each >= known), prompt)
        found.append(Text(nodes, prompt, min(matched, prompt - 1)))
    return found


# ---- the rules of others

Rule = Callable[[Text, int], Iterable[int]]
"""Return where a request keeps states, in the order in which it takes them, given the tokens that hit."""


def multiples(step: int) -> Rule:
    """Keep a state after each `step` tokens of the text that are computed."""
    return lambda text, hit: range(hit // step * step + step, len(text.nodes) + 1, step)


def node_ends(text: Text, hit: int) -> list[int]:
    """Keep a state at the end of the prompt and of the reply."""
    return [text.prompt, len(text.nodes)]


def node_ends_and_branches(text: Text, hit: int) -> list[int]:
    """Keep states near branches, near the end of the prompt, and inside of the reply."""
    branch, end = text.matched // 64 * 64, text.prompt // 64 * 64
    inside = range(text.prompt // 256 * 256 + 256, len(text.nodes) + 1, 256)
    return [*(at for at in sorted({branch, end}) if at > hit), *inside]


RULES: dict[str, Rule] = {
    "every block": multiples(BLOCK),
    "align": multiples(528),
    "node ends": node_ends,
    "node ends +": node_ends_and_branches,
}
"""The policies by name; the goal is to be ahead of the first three."""


def by_rule(texts: Sequence[Text], slots: int, rule: Rule) -> Replay:
    """Replay requests with `slots` states that a rule keeps, the least recently used one evicted first."""
    states: OrderedDict[int, None] = OrderedDict()  # nodes of the trie
    hits = []
    for text in texts:
        hit = next((at for at in range(text.matched, 0, -1) if text.nodes[at - 1] in states), 0)
        for at in ([hit] if hit else []) + list(rule(text, hit)):
            states[text.nodes[at - 1]] = None
            states.move_to_end(text.nodes[at - 1])
            if len(states) > slots:
                states.popitem(last=False)
        hits.append(hit)
    return Replay(hits, sum(text.prompt for text in texts))


# ---- radixkv's caches


def attention_only(asks: Sequence[Ask]) -> Replay:
    """Replay requests through the cache of a model without recurrent state."""
    return _replayed(PrefixCache(_blocks(asks), BLOCK), asks)


def with_states(asks: Sequence[Ask], slots: int) -> Replay:
    """Replay requests through the cache of a model with recurrent state, with `slots` snapshots and one row."""
    cache = PrefixCache(_blocks(asks), BLOCK, state_rows=1, state_snapshots=slots)
    found = _replayed(cache, asks)
    cache.check()
    return found


def _blocks(asks: Sequence[Ask]) -> int:
    """Return enough blocks for the KV of all requests."""
    return sum(2 + (len(ask.prompt) + len(ask.reply)) // BLOCK for ask in asks)


def _replayed(cache: PrefixCache, asks: Sequence[Ask]) -> Replay:
    hits = []
    for ask in asks:
        sequence = cache.open(ask.prompt, limit=len(ask.prompt) - 1)
        hits.append(sequence.length)
        sequence.snapshot_at(ask.message_end)
        chunks = [ask.prompt[at : at + CHUNK] for at in range(sequence.length, len(ask.prompt), CHUNK)]
        for chunk in (*chunks, *([token] for token in ask.reply[:-1].tolist())):
            sequence.extend(chunk)
            if isinstance(cache, PrefixCache):
                cache.copies.drain()
            sequence.commit()
        sequence.close()
    return Replay(hits, sum(len(ask.prompt) for ask in asks))
