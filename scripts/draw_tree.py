"""Draw docs/images/tree.svg: conversations that share a pool through the radix tree, from a real cache's state.

    python scripts/draw_tree.py [docs/images/tree.svg]

Tokens are words here. The script uses a PrefixCache as an engine would, then draws the events of an observer: each node
with its words and their blocks, and the pool below. The picture shows the real state of the cache.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

from radixkv.cache import PrefixCache, Sequence

BLOCK, BLOCKS = 4, 24
COLUMN, ROW = 250, 58
INK, FAINT, PAPER = "#1f2430", "#8a8f98", "#ffffff"
SHADES = ["#4e79a7", "#f28e2b", "#76b7b2", "#e15759", "#59a14f", "#b07aa1", "#edc948", "#9c755f"]

SYSTEM = "system: you are a friendly guide who answers briefly"
CHATS = [
    f"{SYSTEM} user: where is Paris? bot: in France",
    f"{SYSTEM} user: where is Paris? bot: in France user: and Rome? bot: in Italy",
    f"{SYSTEM} user: where is Oslo? bot: in Norway",
    f"{SYSTEM} user: hello bot: hi there",
]


class Node:
    """A node in the picture."""

    def __init__(self, parent: int, start: int, length: int, path: list[str]) -> None:
        self.parent, self.start, self.length = parent, start, length
        self.path = path  # the words of a conversation that runs through it


class Listener:
    """An observer that keeps the shape of the tree."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.speaking: list[str] = []  # the words of the conversation that runs now

    def inserted(self, node: int, parent: int, start: int, tokens: int) -> None:
        self.nodes[node] = Node(parent, start, tokens, self.speaking)

    def grown(self, node: int, tokens: int) -> None:
        self.nodes[node].length += tokens
        self.nodes[node].path = self.speaking

    def split(self, node: int, upper: int, tokens: int) -> None:
        lower = self.nodes[node]
        self.nodes[upper] = Node(lower.parent, lower.start, tokens, lower.path)
        lower.parent, lower.start, lower.length = upper, lower.start + tokens, lower.length - tokens

    def merged(self, node: int, upper: int) -> None:
        above = self.nodes.pop(upper)
        lower = self.nodes[node]
        lower.parent, lower.start, lower.length = above.parent, above.start, lower.length + above.length

    def trimmed(self, node: int, tokens: int, blocks: int, gone: bool) -> None:
        self.nodes[node].length -= tokens
        if gone:
            del self.nodes[node]

    def rooted(self, *_: object) -> None: ...
    def uprooted(self, *_: object) -> None: ...
    def opened(self, *_: object) -> None: ...
    def forked(self, *_: object) -> None: ...
    def closed(self, *_: object) -> None: ...
    def copied(self, *_: object) -> None: ...
    def evicted(self, *_: object) -> None: ...
    def regretted(self, *_: object) -> None: ...


class Words:
    """A word is a token."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]


def run(cache: PrefixCache, ids: list[int]) -> Sequence:
    """Process a prompt like an engine, without a model."""
    sequence = cache.open(ids)
    sequence.extend(ids[sequence.length :])
    sequence.commit()
    return sequence


def text(x: float, y: float, words: str, size: int = 12, fill: str = INK, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" {more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" {more}/>'


class Drawing:
    """Lays the nodes out as a tree from left to right and draws them."""

    def __init__(self, cache: PrefixCache, nodes: dict[int, Node], words: Words) -> None:
        self.nodes = nodes
        self.tables = {}
        for number, node in nodes.items():
            path = " ".join(node.path[: node.start + node.length])
            self.tables[number] = cache.match(words.encode(path)).blocks.tolist()
        self.rows: dict[int, float] = {}
        self.depth: dict[int, int] = {}
        self.leaves = 0
        for number in sorted(n for n, node in nodes.items() if node.parent not in nodes):
            self.place(number, 0)
        self.colour = {number: SHADES[i % len(SHADES)] for i, number in enumerate(self.rows)}

    def place(self, number: int, depth: int) -> float:
        children = [n for n, node in self.nodes.items() if node.parent == number]
        self.depth[number] = depth
        self.rows[number] = 0.0
        rows = [self.place(child, depth + 1) for child in children]
        if not rows:
            rows = [float(self.leaves)]
            self.leaves += 1
        self.rows[number] = sum(rows) / len(rows)
        return self.rows[number]

    def at(self, number: int) -> tuple[float, float]:
        return 16 + self.depth[number] * COLUMN, 62 + self.rows[number] * ROW

    def blocks(self, number: int) -> list[int]:
        node = self.nodes[number]
        return self.tables[number][node.start // BLOCK :]

    def node(self, number: int) -> str:
        x, y = self.at(number)
        node, shade = self.nodes[number], self.colour[number]
        words = " ".join(node.path[node.start : node.start + node.length])
        if len(words) > 31:
            words = words[:30] + "…"
        named = " ".join(str(block) for block in self.blocks(number))
        width = COLUMN - 34
        return "".join(
            (
                box(x, y - 22, width, 42, shade, 'fill-opacity="0.18"'),
                box(x, y - 22, 5, 42, shade),
                text(x + 13, y - 5, words, 12),
                text(x + 13, y + 12, f"{node.length} tokens · blocks {named}", 11, FAINT),
            )
        )

    def edge(self, number: int) -> str:
        parent = self.nodes[number].parent
        if parent not in self.nodes:
            return ""
        (x0, y0), (x1, y1) = self.at(parent), self.at(number)
        x0 += COLUMN - 34
        return f'<path d="M{x0} {y0} C{x0 + 20} {y0} {x1 - 20} {y1} {x1} {y1}" fill="none" stroke="{FAINT}"/>'

    def pool(self, top: float) -> str:
        """Every block, in the colours of the nodes whose tokens it holds."""
        owners: dict[int, list[int]] = {}
        for number in self.rows:
            for block in self.blocks(number):
                owners.setdefault(block, []).append(number)
        parts = []
        for block in range(BLOCKS):
            x, y = 16 + block * 41, top
            shades = [self.colour[number] for number in owners.get(block, [])]
            for i, shade in enumerate(shades):
                part = 36 / len(shades)
                parts.append(f'<rect x="{x + i * part}" y="{y}" width="{part}" height="30" fill="{shade}"/>')
            parts.append(box(x, y, 36, 30, "none", f'stroke="{FAINT}" stroke-opacity="0.6"'))
            parts.append(text(x + 18, y + 20, str(block), 12, PAPER if shades else FAINT, 'text-anchor="middle"'))
        return "".join(parts)

    def svg(self, caption: str) -> str:
        height = 62 + self.leaves * ROW + 86
        top = height - 66
        body = [text(16, 26, "The radix tree: each run of tokens once", 15, INK, 'font-weight="bold"')]
        body += [self.edge(number) for number in self.rows] + [self.node(number) for number in self.rows]
        body += [text(16, top - 12, caption, 15, INK, 'font-weight="bold"'), self.pool(top)]
        body.append(
            text(16, top + 50, "Two colours: a branch begins inside the block, behind tokens it shares.", 11, FAINT)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1010 {height:g}" '
            'font-family="Helvetica, Arial, sans-serif">'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(body)}</svg>\n'
        )


def draw() -> str:
    """The picture of four conversations."""
    listener, words = Listener(), Words()
    cache = PrefixCache(BLOCKS, BLOCK, observer=listener)
    sequences = []
    for chat in CHATS:
        listener.speaking = chat.split()
        sequences.append(run(cache, words.encode(chat)))
    spoken = sum(len(chat.split()) for chat in CHATS)
    slabs = sum(-(-len(chat.split()) // BLOCK) for chat in CHATS)
    used = BLOCKS - cache.free_blocks
    caption = f"The pool: {spoken} tokens of four conversations in {used} blocks of {BLOCK} (apart they take {slabs})"
    picture = Drawing(cache, listener.nodes, words).svg(caption)
    for sequence in sequences:
        sequence.close()
    cache.check()
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw conversations that share a pool, from a real cache's state.")
    parser.add_argument("target", nargs="?", type=Path, default=Path("docs/images/tree.svg"))
    target = parser.parse_args().target
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(draw())
    print(f"drew {target}")
