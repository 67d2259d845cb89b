"""Declare the messages of Ollama's API, and convert them to neutral messages.

Ollama's clients drop the ids of tool calls, or make their own. So the place of a reply makes the ids of its calls, both
here and when it is sent. A result belongs to a call by its id, else by its tool's name, else by its order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from radixkv.chat.calls.formats import CallFormat
from radixkv.chat.messages import Message
from radixkv.serve.bodies import Anything, Body, Only, Several, taking
from radixkv.serve.message_schemas import CalledFunction, arguments_of
from radixkv.serve.role_order import results_in_order

NO_IMAGES = Only([], why="this server reads text")


class OllamaFunction(CalledFunction):
    """A function that the model called."""

    index: Anything = None


class OllamaCall(Body):
    """A call in a reply."""

    id: str | None = None
    type: Anything = None
    function: OllamaFunction


@taking(images=NO_IMAGES)
class OllamaMessage(Body):
    """A message of any role."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Several[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def neutral(self, seed: str, form: CallFormat) -> Message:
        """Return the message for a template; the id of a result is set later."""
        message: Message = {"role": self.role, "content": self.content or ""}
        if self.role == "assistant":
            called = [(each.function.name, arguments_of(each.function.arguments)) for each in self.tool_calls or ()]
            functions = [{"name": name, "arguments": arguments} for name, arguments in called]
            calls = [
                {"id": form.call_id(seed, at), "type": "function", "function": it} for at, it in enumerate(functions)
            ]
            message |= {"tool_calls": calls} if calls else {}
            message |= {"reasoning_content": self.thinking} if self.thinking else {}
        return message | ({"name": self.tool_name} if self.tool_name else {})


def neutral_messages(given: Sequence[OllamaMessage], form: CallFormat) -> list[Message]:
    """Return a conversation in the form of chat templates; `form` makes the ids of calls. O(bytes)."""
    messages = [each.neutral(str(at), form) for at, each in enumerate(given)]
    for is_result, run in groupby(range(len(given)), key=lambda at: given[at].role == "tool"):
        if is_result:
            first, *_ = places = list(run)
            calls = messages[first - 1].get("tool_calls", ()) if first else ()
            waiting: dict[object, deque[str]] = defaultdict(deque)  # ids of calls, by all that a result may name
            for call, sent in zip(calls, given[first - 1].tool_calls or (), strict=False):
                names = {("id", call["id"]), ("id", sent.id or call["id"]), ("name", sent.function.name), "order"}
                for name in names:
                    waiting[name].append(call["id"])
            taken: set[str] = set()
            for rule in range(3):
                for at in places:
                    named = ("id", given[at].tool_call_id), ("name", given[at].tool_name), "order"
                    found = waiting[named[rule]]
                    while found and found[0] in taken:
                        found.popleft()
                    if found and "tool_call_id" not in messages[at]:
                        messages[at]["tool_call_id"] = found[0]
                        taken.add(found[0])
            for at in places:  # results without a call
                messages[at].setdefault("tool_call_id", form.call_id(str(at), 0))
    return results_in_order(messages)
