"""Declare the messages of Ollama's API, and convert them to neutral messages.

Ollama's clients drop the ids of tool calls, or make their own. So the place of a reply makes the ids of its calls, both
here and when it is sent. A result belongs to a call by its id, else by its tool's name, else by its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from radixkv.chat.calls.formats import CallFormat
from radixkv.chat.messages import Message
from radixkv.serve.bodies import Anything, Body, Only, Several
from radixkv.serve.fields import JsonObject
from radixkv.serve.message_schemas import CalledFunction, arguments_of
from radixkv.serve.role_order import results_in_order

NoImages = Annotated[Any, Only([], why="this server reads text")]


class OllamaFunction(CalledFunction):
    """A function that the model called."""

    index: Anything = None


class OllamaCall(Body):
    """A call in a reply."""

    id: str | None = None
    type: Anything = None
    function: OllamaFunction


class OllamaMessage(Body):
    """A message of any role."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoImages = None
    tool_calls: Several[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def neutral(self, seed: str, form: CallFormat) -> Message:
        """Return the message for a template; the id of a result is set later."""
        message: Message = {"role": self.role, "content": self.content or ""}
        if self.role == "assistant":
            functions = [(each.function.name, arguments_of(each.function.arguments)) for each in self.tool_calls or ()]
            calls = [_call(form.call_id(seed, number), *function) for number, function in enumerate(functions)]
            message |= {"tool_calls": calls} if calls else {}
            message |= {"reasoning_content": self.thinking} if self.thinking else {}
        return message | ({"name": self.tool_name} if self.tool_name else {})


def _call(number: str, name: str, arguments: str | JsonObject) -> JsonObject:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def neutral_messages(given: Sequence[OllamaMessage], form: CallFormat) -> list[Message]:
    """Return a conversation in the form of chat templates; `form` makes the ids of calls. O(bytes)."""
    messages = [each.neutral(str(at), form) for at, each in enumerate(given)]
    for is_result, run in groupby(range(len(given)), key=lambda at: given[at].role == "tool"):
        if is_result:
            first, *_ = places = list(run)
            asked = (messages[first - 1].get("tool_calls") if first else None) or []
            calls = list(zip(asked, given[first - 1].tool_calls or (), strict=True)) if asked else []
            for allows in _RULES:
                for at in places:
                    found = next((each for each in calls if allows(given[at], *each)), None)
                    if found is not None and "tool_call_id" not in messages[at]:
                        calls.remove(found)
                        messages[at]["tool_call_id"] = found[0]["id"]
            for at in places:  # results without a call
                messages[at].setdefault("tool_call_id", form.call_id(str(at), 0))
    return results_in_order(messages)


# Whether a result belongs to a call, which is given in its neutral form and in the client's.
_RULES: tuple[Callable[[OllamaMessage, JsonObject, OllamaCall], bool], ...] = (
    lambda result, call, sent: result.tool_call_id is not None and result.tool_call_id in (call["id"], sent.id),
    lambda result, _, sent: result.tool_name == sent.function.name,
    lambda result, _, __: True,
)
