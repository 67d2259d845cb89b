"""Replies in channels, as gpt-oss writes them: what is thought and what is said are messages of their own.

Knows: the control tokens of a channel, as text. Knows no template, no token id and no session.
"""

from __future__ import annotations

import re

CHANNEL, BODY = "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_THOUGHT = "analysis"
_PART = re.compile(
    rf"(?P<head>(?:<\|start\|>)?(?:assistant)?[^<]*{re.escape(CHANNEL)}\s*(?P<channel>\w+)(?P<more>.*?)){re.escape(BODY)}"
    rf"(?P<body>.*?)(?:{'|'.join(map(re.escape, _ENDS[:3]))}|(?={re.escape(_ENDS[3])})|\Z)",
    re.DOTALL,
)


def split_channels(text: str) -> tuple[str, str] | None:
    """(thinking, what is said) of a reply with its control tokens; None if it is in no channels.

    What is said to a tool, and what is no message yet, stays as it is.

    >>> split_channels("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes.")
    ('so', 'Yes.')
    """
    parts = list(_PART.finditer(text))
    if not parts:
        return None
    thought: list[str] = []
    said: list[str] = []
    for part in parts:
        if "to=" in part["head"]:
            said.append(part[0])
        else:
            (thought if part["channel"] == _THOUGHT else said).append(part["body"])
    return "\n".join(thought).strip(), "".join(said) + text[parts[-1].end() :]


def only_thinks(text: str) -> bool:
    """Whether a reply was cut before anything was said."""
    return text.startswith(CHANNEL + _THOUGHT) and not any(end in text for end in _ENDS)
