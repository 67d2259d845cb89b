"""Put the messages of a conversation in an order of roles that a chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from radixkv.chat.messages import Message


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """The orders of roles that a chat template takes.

    `late_system`: a system message after a reply is written in its place. `user_after_results`: a text of the user may
    follow the results of tool calls.
    """

    late_system: bool = True
    user_after_results: bool = True


ANY_ORDER = RoleOrder()


def in_order(messages: Sequence[Message], order: RoleOrder) -> list[Message]:
    """Return messages in an order of roles that a chat template takes. O(bytes).

    Messages of the user that follow each other are joined, since some templates require alternating roles. Results are
    put in the order of their calls. A system message or a text that the template refuses in its place becomes text of
    the user, or of the last result before it. Each message depends on its own turn only, so that later messages do not
    change earlier ones.

    >>> in_order([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], ANY_ORDER)
    [{'role': 'user', 'content': 'a\\nb'}]
    """
    if not order.late_system:
        messages = [{**each, "role": "user"} if each["role"] == "system" else each for each in messages]
    arranged = results_in_order(_joined_user_texts(messages))
    return arranged if order.user_after_results else _with_texts_in_results(arranged)


def results_in_order(messages: list[Message]) -> list[Message]:
    """Put the results after each reply in the order of its calls, if their ids are unique and known."""
    ordered: list[Message] = []
    places: dict[str, int] = {}
    for is_result, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        each = list(run)
        if is_result and {message["tool_call_id"] for message in each} <= places.keys():
            each.sort(key=lambda message: places[message["tool_call_id"]])
        ordered += each
        calls = [call["id"] for call in each[-1].get("tool_calls") or ()]
        places = {call: at for at, call in enumerate(calls)} if len({*calls}) == len(calls) else {}
    return ordered


def _joined_user_texts(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for is_user, run in groupby(messages, key=lambda message: message["role"] == "user"):
        each = list(run)
        joined += [{**each[0], "content": "\n".join(one["content"] for one in each)}] if is_user else each
    return joined


def _with_texts_in_results(messages: Sequence[Message]) -> list[Message]:
    """Append each text of the user that follows a result to that result."""
    joined: list[Message] = []
    for each in messages:
        if each["role"] == "user" and joined and joined[-1]["role"] == "tool":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n{each['content']}"}
        else:
            joined.append(each)
    return joined
