"""Replies are split in the same way for any pieces in which they arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.chat.thinking import split_thinking
from radixkv.serve.reply import ReplyReader

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
PARTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        CALL,
        "<",
        "<tool",
        "</th",
        " ",
        "\n\n",
        "Hi.",
        "{",
        "é",
        "a b",
    ]
)


def read(texts, reads_calls=True, thinking=False, channels=False):
    reader = ReplyReader(reads_calls=reads_calls, thinking=thinking, channels=channels, tools={"now": {}})
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.finish()
    assert "".join(piece.content for piece in pieces) == reader.content
    assert "".join(piece.thinking for piece in pieces) == reader.thinking
    deltas = [piece.call for piece in pieces if piece.call]
    assert [delta.call for delta in deltas if delta.call] == reader.calls
    assert [delta.number for delta in deltas if delta.opens] == list(range(len(reader.calls)))
    for number, call in enumerate(reader.calls):
        assert "".join(delta.arguments for delta in deltas if delta.number == number) == call.text
    assert len({call.id for call in reader.calls}) == len(reader.calls)
    return reader.content, reader.thinking, [(call.name, call.arguments) for call in reader.calls]


NOW = ("now", {"zone": "UTC"})


@pytest.mark.parametrize(
    ("text", "content", "thinking", "calls"),
    [
        ("Hello <b>you</b>.\n", "Hello <b>you</b>.\n", "", []),
        (" \n", " \n", "", []),
        (f"Let me see.\n{CALL}", "Let me see.", "", [NOW]),
        (f"{CALL}\n{CALL}\n", "", "", [NOW, NOW]),
        (f"{CALL} and then", "and then", "", [NOW]),
        ("<tool_call>nonsense</tool_call> ", "<tool_call>nonsense</tool_call> ", "", []),
        ("So: <tool_call>{", "So: <tool_call>{", "", []),
        ("<think>\nhm\n</think>\n\nYes.", "Yes.", "hm", []),
        (f"<think>hm</think>{CALL}", "", "hm", [NOW]),
        ("<think>never ends", "", "never ends", []),
        ("not at first <think>x</think>", "not at first <think>x</think>", "", []),
        ("<thin", "<thin", "", []),
    ],
)
def test_what_a_reply_says(text, content, thinking, calls):
    assert read([text]) == (content, thinking, calls)
    assert read(text) == (content, thinking, calls)  # letter by letter


def test_a_prompt_may_have_opened_the_thinking():
    assert read(["hm\n</think>\n\nYes."], thinking=True) == ("Yes.", "hm", [])


def test_an_opening_tag_that_the_prompt_had_is_not_thought_again():
    for text in ("<think>\nhm</think>Yes.", " <think>hm</think> Yes."):
        assert read([text], thinking=True) == read(text, thinking=True) == ("Yes.", "hm", [])
        assert split_thinking(text, opened=True) == ("hm", "Yes.")


def test_calls_are_text_without_tools():
    assert read([f"a {CALL}"], reads_calls=False) == (f"a {CALL}", "", [])


@given(st.lists(PARTS, max_size=12), st.booleans(), st.booleans(), st.data())
def test_pieces_make_no_difference(parts, reads_calls, thinking, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read([text], reads_calls, thinking)
    assert read(pieces, reads_calls, thinking) == whole
    if thinking and not reads_calls:
        assert split_thinking(text, opened=True) == (whole[1], whole[0])


# ---- channels

AGAIN = "<|start|>assistant"
THOUGHT, SPOKEN = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TO_A_TOOL = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("text", "content", "thinking", "calls"),
    [
        (f"{THOUGHT} hm. <|end|>{AGAIN}{SPOKEN} Yes. ", " Yes. ", "hm.", []),
        (f"{THOUGHT}a\n<|end|>{AGAIN}{THOUGHT} b\n<|end|>{AGAIN}{SPOKEN}Yes.", "Yes.", "a\n\n b", []),
        (f"{THOUGHT}hm<|end|>{AGAIN}{TO_A_TOOL}", f"{AGAIN}{TO_A_TOOL}", "hm", []),
        (f"{THOUGHT}never ends", "", "never ends", []),
        (f"{THOUGHT}hm<|end|>{AGAIN}", AGAIN, "hm", []),
        (f"{SPOKEN}So: {CALL}", "So:", "", [NOW]),
        ("<|channel|>ana", "<|channel|>ana", "", []),
        ("<|channel|><|message|>hm", "<|channel|><|message|>hm", "", []),
        ("Hello <b>you</b>.", "Hello <b>you</b>.", "", []),
        (f"No head. {SPOKEN}Yes.", "No head. Yes.", "", []),
        (f"assistant {'x' * 300}{SPOKEN}Yes.", f"assistant {'x' * 300}Yes.", "", []),
        ("  Hello", "  Hello", "", []),
        ("<think><think> ", "", "<think>", []),
        ("<think>never ends </thin\n", "", "never ends </thin", []),
    ],
)
def test_what_a_reply_in_channels_says(text, content, thinking, calls):
    assert read([text], channels=True) == (content, thinking, calls)
    assert read(text, channels=True) == (content, thinking, calls)  # letter by letter
    if not calls:
        assert split_thinking(text) == (thinking, content)  # as a session reads it


def test_what_is_said_in_a_channel_is_told_at_once():
    reader = ReplyReader(reads_calls=True, thinking=False, channels=True)
    texts = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "So",
        " it is",
        "<|end|>",
        *f"{AGAIN}{SPOKEN}",
        "Ye",
        "s <",
        "b>",
    ]
    pieces = [piece for text in texts for piece in reader.push(text)]
    assert [piece.thinking or piece.content for piece in pieces] == ["So", " it is", "Ye", "s", " <b>"]
