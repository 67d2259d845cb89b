"""Bodies of the Messages API: how they become neutral messages, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.chat.template_arguments import template_arguments, thinking_option
from radixkv.serve.anthropic.schemas import Dialect, read_message
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import IgnoredFields
from radixkv.serve.role_order import RoleOrder
from tests.serve.anthropic.messages import ASKED, BODY, LOOK, MARK

CALL = {"type": "tool_use", "id": "c1", "name": "look", "input": {"path": "a"}}
NEUTRAL_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"path": "a"}}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.00b; cc_entrypoint=sdk-cli;"


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def read(*, late_system: bool = True, keeps_billing: bool = False, **fields: Any) -> Any:
    dialect = Dialect(keeps_billing, RoleOrder(late_system))
    return read_message({**BODY, **fields}, IgnoredFields(), dialect)


def messages(*given: Any, **fields: Any) -> Any:
    return read(messages=list(given), **fields).messages


def test_strings_and_blocks_and_cache_marks_are_one_form():
    plain = messages(said("user", "a\nb"), said("assistant", "c"), said("user", "d"), system="s\nt")
    blocks = messages(
        said("user", [text("a"), text("b", **MARK)]),
        said("assistant", [text("c")]),
        said("user", [text("d", **MARK)]),
        system=[text("s", **MARK), text("t")],
    )
    assert blocks == plain
    assert plain == [said("system", "s\nt"), said("user", "a\nb"), said("assistant", "c"), said("user", "d")]


def test_a_reply_is_joined_as_it_was_split():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "?"},
        text("a "),
        CALL,
        text("b"),
    ]
    reply = messages(*ASKED, said("assistant", blocks), said("user", "go"))[1]
    assert reply == {**said("assistant", "a b"), "tool_calls": [NEUTRAL_CALL], "reasoning_content": "hm"}
    assert messages(*ASKED, said("assistant", []), said("user", "go"))[1] == said("assistant", "")


def test_results_of_tools_are_messages_in_the_order_of_their_calls():
    second = {**CALL, "id": "c2"}
    results = [
        {"type": "tool_result", "tool_use_id": "c2", "content": [text("x"), text("y")], **MARK},
        {"type": "tool_result", "tool_use_id": "c1", "content": "z"},
        text("and go on", **MARK),
    ]
    for sent in (results, results[::-1]):
        assert messages(*ASKED, said("assistant", [CALL, second]), said("user", sent))[2:] == [
            {"role": "tool", "tool_call_id": "c1", "content": "z"},
            {"role": "tool", "tool_call_id": "c2", "content": "x\ny"},
            said("user", "and go on"),
        ]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        (
            {"content": "<tool_use_error>No file</tool_use_error>", "is_error": True},
            "<tool_use_error>No file</tool_use_error>",
        ),
        ({"content": "no such file", "is_error": False}, "no such file"),
        ({"content": [], "is_error": True}, "Error: "),
        (
            {"content": [{"type": "tool_reference", "tool_name": "find"}, {"type": "text", "text": "x"}]},
            "The tool find is available.\nx",
        ),
    ],
)
def test_the_text_of_a_result(fields: dict[str, Any], content: str):
    result = {"type": "tool_result", "tool_use_id": "c1", **fields}
    assert messages(*ASKED, said("assistant", [CALL]), said("user", [result]))[2]["content"] == content


def test_system_messages_before_the_first_reply_join_the_system_prompt():
    early = [said("user", "a"), said("system", [text("t", **MARK)]), said("user", "b")]
    assert messages(*early, system="s") == [said("system", "s\nt"), said("user", "a\nb")]
    late = [said("user", "a"), said("system", "t"), said("assistant", "b"), said("system", "u"), said("user", "c")]
    assert messages(*late) == [said("system", "t"), said("user", "a"), *late[2:]]
    as_text = [said("system", "t"), said("user", "a"), said("assistant", "b"), said("user", "u\nc")]
    assert messages(*late, late_system=False) == as_text


@pytest.mark.parametrize("as_blocks", [True, False])
def test_the_line_for_billing_is_dropped_unless_it_is_kept(as_blocks: bool):
    system = [text(BILLING), text("Be kind.")] if as_blocks else BILLING
    rest = [said("system", "Be kind.")] if as_blocks else []
    assert messages(*ASKED, system=system) == [*rest, *ASKED]
    assert messages(*ASKED, system=system, keeps_billing=True)[0]["content"].startswith(BILLING)
    later = [text("Be kind."), text(BILLING)]
    assert BILLING in messages(*ASKED, system=later)[0]["content"]


def test_tools_keep_what_a_template_writes_and_nothing_else():
    marked = {**LOOK, "type": "custom", "defer_loading": True, "eager_input_streaming": True, **MARK}
    function = {"name": "look", "description": LOOK["description"], "parameters": LOOK["input_schema"]}
    assert read(tools=[marked]).tools == [{"type": "function", "function": function}] == read(tools=[LOOK]).tools
    assert read(tools=[{"name": "now", "input_schema": {}}]).tools == [
        {"type": "function", "function": {"name": "now", "parameters": {}}}
    ]
    assert read(tools=[]).tools is None


def test_tools_of_a_provider_are_left_out_with_a_warning():
    ignored = IgnoredFields()
    body = {**BODY, "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, LOOK]}
    assert [each["function"]["name"] for each in read_message(body, ignored, Dialect()).tools or []] == ["look"]
    assert ignored.text() == "tools[0].type"
    with pytest.raises(ApiError, match=r"tools\[0\]"):
        read_message(body, None, Dialect())


def test_which_replies_are_read_for_calls():
    for choice, expected in ((None, True), ({"type": "auto"}, True), ({"type": "none"}, False)):
        assert read(tools=[LOOK], tool_choice=choice).reads_calls is expected
    assert not read(tool_choice={"type": "auto"}).reads_calls


def test_options_and_hints():
    request = read(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["X"], max_tokens=32000, stream=True)
    params = request.options.params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 5, ("X",))
    assert (params.max_tokens, request.options.bounded, request.options.stream) == (32000, True, True)
    assert request.options.session_key is None
    assert read(metadata={"user_id": "u"}).options.session_key == "u"
    assert not read(thinking={"type": "adaptive", "display": "updates"}).omits_thinking  # as Claude Code sends it
    assert not request.marks_cache and not request.omits_thinking and request.options.model == "claude-any"
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("x", **MARK)]}
    for marked in (
        {"system": [text("s", **MARK)]},
        {"tools": [{**LOOK, **MARK}]},
        {"messages": [said("user", [text("a", **MARK)])]},
        {"messages": [*ASKED, said("assistant", [CALL]), said("user", [result])]},
        MARK,
    ):
        assert read(**marked).marks_cache


def test_thinking_and_effort_are_options_of_the_template():
    for kind, enabled in (("enabled", True), ("adaptive", True), ("disabled", False)):
        [option] = read(thinking={"type": kind}).template_options
        assert option == thinking_option("thinking", enabled=enabled, hint=kind == "adaptive")
    both = read(thinking={"type": "adaptive"}, output_config={"effort": "max"}).template_options
    arguments, unread = template_arguments("{{ reasoning_effort }}", both)
    assert arguments == {"reasoning_effort": "high"} and unread == []
    demanded = read(thinking={"type": "enabled"}, output_config={"effort": "low"}).template_options
    assert template_arguments("{{ tone }}", demanded) == ({}, ["thinking"])  # effort is a hint, as "adaptive" is
    assert read(output_config={}).template_options == () == read().template_options
