"""Generate four-choice items from a seed, and the local task of lm-evaluation-harness that asks them.

An item is a question about a capital, an opposite, a kind of animal, a sum, or the order of days and months. Its
choices are whole sentences of several tokens that share their words, so that only a few tokens decide. Each question
begins with the name of the person that asks it, and no two questions are equal. The prompt of an item is the same few
solved items (the shots) followed by the question, as the harness renders it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

TASK = "radixkv_facts"
CHOICES = 4
SEED = 23


def words(text: str) -> list[str]:
    return text.split()


def pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in words(text))


CAPITALS = pairs("""
France:Paris Italy:Rome Spain:Madrid Germany:Berlin Austria:Vienna Greece:Athens Portugal:Lisbon Poland:Warsaw
Russia:Moscow Japan:Tokyo China:Beijing India:Delhi Egypt:Cairo Kenya:Nairobi Cuba:Havana Peru:Lima Chile:Santiago
Canada:Ottawa Ireland:Dublin Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Hungary:Budapest
Turkey:Ankara Iran:Tehran Iraq:Baghdad Thailand:Bangkok Vietnam:Hanoi Nepal:Kathmandu Belgium:Brussels
""")
OPPOSITES = pairs("""
hot:cold big:small old:young high:low fast:slow hard:soft early:late full:empty happy:sad light:dark long:short
loud:quiet near:far new:old open:closed rich:poor right:wrong strong:weak true:false wet:dry wide:narrow clean:dirty
cheap:expensive deep:shallow easy:difficult heavy:light thick:thin safe:dangerous sweet:sour brave:cowardly
""")
KINDS = {
    "bird": words("eagle sparrow owl penguin parrot robin falcon swan"),
    "fish": words("trout salmon tuna cod herring carp sardine pike"),
    "insect": words("ant bee beetle butterfly mosquito wasp moth cricket"),
    "mammal": words("dog cow whale horse bat lion elephant mouse"),
    "reptile": words("snake lizard turtle crocodile gecko iguana tortoise chameleon"),
    "tree": words("oak pine birch maple willow cedar elm spruce"),
}
NAMES = words("""
Ada Ben Carla David Emma Felix Grace Hugo Irene Jack Karen Leo Maria Nina Oscar Paula Quinn Rosa Simon Tina Ursula
Victor Wanda Xavier Yara Zoe Alan Bella Carl Diana Ernst Fiona George Helen Ivan Julia Kevin Laura Martin Nora
""")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")


@dataclass(frozen=True)
class Item:
    """A question, four different choices, and the index of the right one."""

    question: str
    choices: list[str]
    answer: int


def items(count: int, seed: int = SEED) -> list[Item]:
    """Return different items, a prefix of the same endless list for each count.

    >>> items(2) == items(3)[:2]
    True
    """
    source, found = random.Random(seed), dict[str, Item]()
    while len(found) < count:
        item = source.choice(MAKERS)(source)
        item = replace(item, question=f"{source.choice(NAMES)} asks: {item.question}")
        found.setdefault(item.question, item)
    return list(found.values())


# ---- kinds of questions


def capital(source: random.Random) -> Item:
    country = source.choice(list(CAPITALS))
    question = f"Which city is the capital of {country}?"
    return _shuffled(source, question, CAPITALS[country], CAPITALS.values(), f"The capital of {country} is {{}}.")


def opposite(source: random.Random) -> Item:
    word = source.choice(list(OPPOSITES))
    others = [each for each in OPPOSITES.values() if each != word]
    return _shuffled(
        source, f"Which word means the opposite of {word}?", OPPOSITES[word], others, f"{{}} is the opposite of {word}."
    )


def kind(source: random.Random) -> Item:
    right = source.choice(list(KINDS))
    name = source.choice(KINDS[right])
    return _shuffled(
        source, f"Is the {name} a bird, a fish or something else?", right, KINDS, f"The {name} is a kind of {{}}."
    )


def addition(source: random.Random) -> Item:
    one, other = source.randint(2, 40), source.randint(2, 40)
    right = one + other
    others = [str(right + by) for by in (-10, -2, -1, 1, 2, 10)]
    return _shuffled(source, f"How much is {one} plus {other}?", str(right), others, f"{one} plus {other} is {{}}.")


def order(source: random.Random) -> Item:
    names, noun = source.choice(((DAYS, "day"), (MONTHS, "month")))
    at = source.randrange(len(names))
    word, by = source.choice((("after", 1), ("before", -1)))
    right = names[(at + by) % len(names)]
    others = [each for each in names if each != names[at]]
    return _shuffled(
        source, f"Which {noun} comes {word} {names[at]}?", right, others, f"{{}} comes {word} {names[at]}."
    )


MAKERS: tuple[Callable[[random.Random], Item], ...] = (capital, opposite, kind, addition, order)


def _shuffled(source: random.Random, question: str, right: str, others: object, sentence: str) -> Item:
    """Return an item with the right word and three of the others, each put into the sentence."""
    wrong = sorted({str(each) for each in others if each != right})  # type: ignore[attr-defined]
    words = [right, *source.sample(wrong, CHOICES - 1)]
    source.shuffle(words)
    choices = [sentence.format(word) for word in words]
    return Item(question, [each[0].upper() + each[1:] for each in choices], words.index(right))


# ---- prompts and the task's files


def prompt(item: Item, shots: Sequence[Item]) -> str:
    """Return the context of an item as lm-evaluation-harness renders it: solved shots, then the question."""
    solved = [f"{_asked(shot)} {shot.choices[shot.answer]}" for shot in shots]
    return "\n\n".join([*solved, _asked(item)])


def continuations(item: Item) -> list[str]:
    """Return the choices as texts that continue the prompt."""
    return [f" {choice}" for choice in item.choices]


def _asked(item: Item) -> str:
    return f"Question: {item.question}\nAnswer:"


def write_task(folder: Path, asked: Sequence[Item], shots: Sequence[Item]) -> Path:
    """Write the items, the shots and a YAML task to a folder; return the YAML file.

    JSON is valid YAML, so the file needs no YAML writer. The names of the data files are absolute, because the harness
    resolves names against its own working directory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, rows in (("train", shots), ("test", asked)):
        file = (folder / f"{split}.json").resolve()
        file.write_text(json.dumps([asdict(each) for each in rows], indent=1))
        files[split] = str(file)
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": len(shots),
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": " ",
        "fewshot_delimiter": "\n\n",
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in METRICS],
    }
    written = folder / f"{TASK}.yaml"
    written.write_text(json.dumps(task, indent=1))
    return written


METRICS = ("acc", "acc_norm")
