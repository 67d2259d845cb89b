"""Forty conversations with a real model: several turns each, with forks, edits and rewinds, interleaved on one engine.

Fourteen long stories run at the same time, so that a small pool runs out of blocks. The script of a conversation does
not depend on the replies, so every engine is asked the same messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from radixkv import ChatSession, Engine, Handle, ReplyStream, SamplingParams, Usage
from radixkv.cli.demo_script import MANUAL

HANDBOOK = """You work at the front desk of the Lighthouse, a small hotel on an island in the north. The hotel has
twelve rooms on three floors. Rooms one to four face the harbour, five to eight face the garden, and nine to twelve
have a view of the open sea. There is no lift. Every room has a desk, a kettle, a bookshelf and a window that opens.
Breakfast is from seven to ten. It has bread, butter, cheese, smoked fish, eggs, porridge and coffee. Dinner is at
seven, and guests who want it say so before noon. The ferry leaves at eight in the morning and at four in the
afternoon. The crossing takes fifty minutes. In a storm the ferry stays in the harbour, and guests may keep their
rooms at half the price. Bicycles stand in the shed next to the kitchen and cost nothing. The path around the island
is eleven kilometres long and takes three hours on foot. The old lighthouse is open on Saturdays. It was built in
1874, has 142 steps, and its lamp can be seen from thirty kilometres away. Seals lie on the rocks in the east from
May to September. Puffins nest in the cliffs in June. Walking there is forbidden in that month. The shop by the pier
sells bread, maps, wool, stamps and rope. The nearest doctor is on the mainland; the nurse lives in the yellow
house. Answer politely and in one or two sentences."""

SYSTEMS = (None, "You answer in one short sentence.", MANUAL, HANDBOOK, "You are a patient teacher of ten-year-olds.")

QUESTIONS = (
    "What is the capital of France?",
    "How long does delivery take, and what does it cost?",
    "When does the ferry leave?",
    "Write a Python function that returns the larger of two numbers.",
    "Why is the sky blue?",
    "List three things to pack for a week by the sea.",
    "Can I return a lamp that I bought two weeks ago?",
    "Is there a lift?",
    "Translate into Spanish: the cat sleeps on the roof.",
    "What is 12 + 30?",
    "Now add 7 to that.",
    "Please repeat your last answer in fewer words.",
    "Which products are on shelf A?",
    "How many steps does the lighthouse have?",
    "Tell me a short story about a fox and a mirror.",
    "Explain photosynthesis to a child.",
    "日本の首都はどこですか。",
    "Grüße aus Köln! Was ist ein Leuchtturm?",
    "Complete the list: Monday, Tuesday, Wednesday,",
    "I am sad today. 😢 Can you cheer me up?",
    "What did I ask you first?",
    "Who is the manager?",
    "What is for breakfast?",
    "Give me two words that rhyme with 'light'.",
    "Here is a table.\n\n| item | price |\n|---|---|\n| pen | 2 |\n| book | 9 |\n\nWhich item is cheaper?",
    "What is the opposite of cold?",
    "Fix this sentence: she go to school yesterday.",
    "Summarise our conversation in one line.",
    'What does this print?\n\n```python\nfor i in range(3):\n    print(i * "ab")\n```',
    "How far is it around the island?",
    "What is water made of?",
)

# What happens after the opening: each word is one step. "fork" starts another conversation from this point.
SCRIPTS = (
    "say say say say",
    "say say fork say say",
    "say say say edit say",
    "say fork say rewind say say",
    "say say rewind edit say fork say",
)

LENGTHS = (12, 20, 32)
GREEDY = SamplingParams(temperature=0)
SAMPLED = (
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.1, top_k=40),
    SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.3),
)
CONVERSATIONS = 40
ROOTS = 25  # five of each script; the forks of three scripts bring the number to 40
IN_FLIGHT = 10  # replies of conversations that are computed at the same time

STORIES = (
    "a fox", "a lamp", "two sisters", "the sea", "a clock", "a lost key", "the moon", "an old dog", "a bridge",
    "a violin", "the first snow", "a kite", "a tall tree", "a red boat",
)  # fmt: skip
STORY = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@dataclass(frozen=True)
class Answer:
    """A reply of a conversation with the prompt that the engine got."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    params: SamplingParams
    usage: Usage


class Conversation:
    """A session and the steps that are left. `name` is unique: "7", and "7/2" for a fork at its step 2."""

    def __init__(self, name: str, session: ChatSession, steps: tuple[str, ...], at: int, number: int) -> None:
        self.name, self.session, self.steps, self.at, self.number = name, session, steps, at, number

    def params(self) -> SamplingParams:
        """Return the parameters of the next reply: every fourth conversation samples, with a seed of its own."""
        base = GREEDY if self.number % 4 else SAMPLED[self.number // 4 % len(SAMPLED)]
        seed = None if base.greedy else 1000 * self.number + self.at
        return base.but(max_tokens=LENGTHS[(self.number + self.at) % len(LENGTHS)], seed=seed)

    def begin(self) -> ReplyStream:
        """Send the message of this step; other conversations ask other questions in another order."""
        text = QUESTIONS[(7 * self.number + 3 * self.at) % len(QUESTIONS)]
        if self.steps[self.at] == "edit":
            return self.session.stream_edit(self.session.turns // 2 + 1, text, self.params())
        return self.session.stream(text, self.params())

    def advance(self) -> Iterator[Conversation]:
        """Make the steps up to the next reply; yield forks."""
        while self.at < len(self.steps) and self.steps[self.at] in ("fork", "rewind"):
            self.at += 1
            if self.steps[self.at - 1] == "rewind":
                self.session.rewind()
            else:
                [twin] = self.session.fork()
                yield Conversation(f"{self.name}/{self.at}", twin, self.steps, self.at, self.number + 100)


def play(engine: Engine, in_flight: int = IN_FLIGHT) -> dict[tuple[str, int], Answer]:
    """Let the engine write all stories, and hold all conversations meanwhile; return answers by (name, step)."""
    stories = list(enumerate(_begin_stories(engine)))
    answers = _converse(engine, in_flight)
    for number, (prompt, params, handle) in stories:
        story = handle.result()
        answers[f"story {number}", 0] = Answer(prompt, story.token_ids, params, story.usage)
    return answers


def _begin_stories(engine: Engine) -> Iterator[tuple[tuple[int, ...], SamplingParams, Handle]]:
    """Yield the prompt, parameters and handle of each story; every third is sampled."""
    for number, subject in enumerate(STORIES):
        params = STORY if number % 3 else STORY.but(temperature=1.0, seed=number)
        text = f"<|im_start|>user\nTell me a long story about {subject}.<|im_end|>\n<|im_start|>assistant\n"
        prompt = engine.model.tokenizer.encode(text, add_special_tokens=False)
        yield tuple(prompt), params, engine.submit(prompt, params)


def _converse(engine: Engine, in_flight: int) -> dict[tuple[str, int], Answer]:
    """Hold all conversations, `in_flight` at a time, each a step further in turn."""
    waiting: deque[Conversation] = deque()
    for number in range(ROOTS):
        session = engine.chat(SYSTEMS[number % len(SYSTEMS)])
        steps = tuple(SCRIPTS[number // len(SYSTEMS)].split())
        waiting.append(Conversation(str(number), session, steps, 0, number))
    running: deque[tuple[Conversation, ReplyStream]] = deque()
    answers: dict[tuple[str, int], Answer] = {}
    while True:
        while waiting and len(running) < in_flight:
            each = waiting.popleft()
            waiting.extend(each.advance())
            if each.at < len(each.steps):
                running.append((each, each.begin()))
        if not running:
            break
        each, stream = running.popleft()
        reply = stream.wait()
        answers[each.name, each.at] = Answer(tuple(stream.prompt), reply.token_ids, each.params(), reply.usage)
        each.at += 1
        waiting.append(each)
    return answers
