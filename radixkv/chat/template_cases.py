"""Provide short dialogues to try a chat template with, and the text that a model would sample in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from radixkv.chat.messages import Message, ToolCall
from radixkv.chat.reply_form import ReplyForm, shared
from radixkv.chat.splicing import from_stop_text
from radixkv.chat.template import ChatTemplate
from radixkv.chat.thinking import THINK_END
from radixkv.errors import ChatError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_train",
            "description": "Find a train.",
            "parameters": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
        },
    }
]
_CALLS = (ToolCall("call00001", "find_train", {"to": "Oslo"}), ToolCall("call00002", "find_train", {"to": "Rome"}))
_RESULTS = ("It leaves at seven.", "That one leaves at nine.")
_TURNS = (("What is 2 + 2?", "It is four."), ("And plus one?", "That makes five."), ("Minus three?", "Two remain."))
_SYSTEM: Message = {"role": "system", "content": "Answer in one short sentence, politely."}
_LAST: Message = {"role": "user", "content": "Thanks, and goodbye."}
_THOUGHT = "Numbers, so arithmetic."


@dataclass(frozen=True)
class Dialogue:
    """A dialogue of `turns` turns and one more question; the first turn makes `calls` tool calls.

    With calls the model also thinks, if the template has a place for thinking.
    """

    name: str
    turns: int
    system: bool = False
    thinks: bool = False
    calls: int = 0

    @property
    def with_tools(self) -> bool:
        """Whether the dialogue makes tool calls."""
        return self.calls > 0

    def messages(self, form: ReplyForm) -> list[Message]:
        """Return the messages in the form that the template takes."""
        messages = [_SYSTEM] if self.system else []
        thinks = self.thinks or (self.with_tools and form.thinking_in is not None)
        for at, (question, answer) in enumerate(_TURNS[: self.turns]):
            messages.append({"role": "user", "content": question})
            messages += _called(self.calls, _THOUGHT if thinks else "") if at == 0 else []
            said = {"role": "assistant", "content": answer}
            messages.append(form.thoughtful(_THOUGHT, answer) if thinks else said)
        return list(form.taken([*messages, _LAST]))


DIALOGUES = (
    Dialogue("plain", 1),
    Dialogue("many turns", 3),
    Dialogue("system", 2, system=True),
    Dialogue("thinking", 2, thinks=True),
    Dialogue("tools", 2, system=True, calls=1),
    Dialogue("parallel calls", 1, calls=2),
)


def sampled_text(template: ChatTemplate, messages: Sequence[Message], at: int) -> str:
    """Return the text that a model would sample for a reply of a dialogue, thinking included.

    Raises ChatError if the template does not show the reply.
    """
    reply = messages[at]
    opened = template.form.opens_thinking(after_results=messages[at - 1]["role"] == "tool")
    if reply.get("tool_calls"):
        results = takewhile(lambda message: message["role"] == "tool", messages[at + 1 :])
        return _with_calls(template, reply, list(results), opened=opened)
    answer = str(reply["content"]).rpartition(THINK_END)[2].lstrip()
    in_history, found, after = _after_prompt(template, [_LAST, reply, _LAST]).partition(answer)
    said = answer + _closing(after, template.stop_texts)
    if THINK_END in reply["content"] or "reasoning_content" in reply:
        shown = _after_prompt(template, [_LAST, reply], is_last=True).partition(answer)[0]
        if _THOUGHT in shown:
            return shown + said
        return _thought(template, opened=opened) + said
    if not found:
        raise ChatError("the chat template drops an assistant's message")
    return (f"{THINK_END}\n\n" if opened and THINK_END not in in_history else "") + in_history + said


def _closing(after: str, stops: Sequence[str]) -> str:
    """Return the text that a model samples between its answer and the stop token; empty without a stop token."""
    turn = after.partition(_LAST["content"])[0]
    return turn[: min((at for at in map(turn.find, stops) if at >= 0), default=0)]


def _thought(template: ChatTemplate, *, opened: bool) -> str:
    """Return thinking in tags; the model samples it although the template shows it nowhere."""
    start, end = template.form.thinking_tags
    return f"{'' if opened else start}\n{_THOUGHT}\n{end}\n\n"


def _with_calls(template: ChatTemplate, reply: Message, results: Sequence[Message], *, opened: bool) -> str:
    text = _after_prompt(template, [_LAST, reply, *results])
    last = str(_CALLS[len(reply["tool_calls"]) - 1].arguments["to"])
    _, found, after = text.partition(last)
    if not found:
        raise ChatError("the chat template does not show tool calls")
    said = text.removesuffix(from_stop_text(after, template.stop_texts, template.form.after_calls))
    if _THOUGHT in said:
        return said
    if "reasoning_content" in reply:
        return _thought(template, opened=opened) + said
    return (f"{THINK_END}\n\n" if opened and THINK_END not in said else "") + said


def _after_prompt(template: ChatTemplate, messages: Sequence[Message], *, is_last: bool = False) -> str:
    """Render the messages, and return the text from the start of the first reply."""
    text = template.rendering.render(messages, reply=not is_last).partition(_LAST["content"])[2]
    return text[shared(text, template.form.begins) :]


def _called(count: int, thought: str) -> list[Message]:
    """Return a reply that makes `count` calls, with its thinking if any, and the results of the calls."""
    calls = _CALLS[:count]
    asks: Message = {"role": "assistant", "content": "", "tool_calls": [call.as_message() for call in calls]}
    if thought:
        asks["reasoning_content"] = thought
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said}
        for call, said in zip(calls, _RESULTS, strict=False)
    ]
    return [asks, *results] if calls else []
