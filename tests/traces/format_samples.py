"""A small file of each format, written for the tests after the formats' descriptions: no real data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def lines(objects: Iterable[Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


USER = {"role": "user", "content": "Where is the moss garden?"}
SAYS = {"role": "assistant", "content": "Behind the old mill."}
THANKS = {"role": "user", "content": "Thank you. When does it open?"}
OPENS = {"role": "assistant", "content": "At nine."}

BLOCKS = {"timestamp": 3, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}


def claude(uuid: str, parent: str | None, second: int, type: str, message: dict[str, Any] | None, **more: Any) -> Any:
    fields = {
        "parentUuid": parent, "isSidechain": False, "sessionId": "s1", "type": type, "uuid": uuid,
        "timestamp": f"2025-10-01T10:{second // 60:02}:{second % 60:02}.000Z", **more,
    }  # fmt: skip
    return fields if message is None else {**fields, "message": message}


def block(id: str, part: dict[str, Any], output: int, stop: str | None = None) -> dict[str, Any]:
    usage = {"input_tokens": 4, "cache_read_input_tokens": 18000, "output_tokens": output}
    return {"id": id, "role": "assistant", "model": "m", "content": [part], "stop_reason": stop, "usage": usage}


def result(number: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": number, "content": text}]}


READ = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file": "a.py"}}
GREP = {"type": "tool_use", "id": "t2", "name": "Grep", "input": {"pattern": "moss"}}
CLAUDE = [
    {"type": "summary", "summary": "Moss", "leafUuid": "u9"},
    {"type": "file-history-snapshot", "messageId": "x", "snapshot": {}},
    claude("u1", None, 0, "user", {"role": "user", "content": "Find the moss."}),
    claude("a1", "u1", 3, "assistant", block("m1", {"type": "thinking", "thinking": "Hmm."}, 1)),
    claude("a2", "a1", 4, "assistant", block("m1", READ, 1)),
    claude("a3", "a2", 5, "assistant", block("m1", GREP, 61, "tool_use")),  # two calls at once
    claude("r1", "a2", 6, "user", result("t1", "print('moss')")),
    claude("r2", "a3", 8, "user", result("t2", "a.py:1")),
    claude("x1", "r2", 8, "system", None),
    claude("a4", "x1", 12, "assistant", block("m2", {"type": "text", "text": "It is in a.py."}, 9, "end_turn")),
    claude("u2", "a4", 40, "user", {"role": "user", "content": "Remove it."}),
    claude("e1", "u2", 41, "assistant", {"model": "<synthetic>", "content": [{"type": "text", "text": "API error"}]}),
    claude("a5", "u2", 45, "assistant", block("m3", {"type": "text", "text": "Done."}, 3, "end_turn")),
    claude("u3", "a4", 60, "user", {"role": "user", "content": "Move it."}),  # the turn before was edited
    claude("a6", "u3", 65, "assistant", block("m4", {"type": "text", "text": "Moved."}, 4, "end_turn")),
    claude("v1", None, 61, "user", {"role": "user", "content": "Search for moss."}, isSidechain=True, agentId="g"),
    claude("b1", "v1", 62, "assistant", block("m5", {"type": "text", "text": "Found."}, 2, "end_turn"), agentId="g"),
]


def codex(second: int, kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": f"2025-10-01T10:00:{second:02}.000Z", "type": kind, "payload": payload}


def count(output: int) -> dict[str, Any]:
    return {"type": "token_count", "info": {"last_token_usage": {"input_tokens": 900, "output_tokens": output}}}


CODEX = [
    codex(0, "session_meta", id="c1", base_instructions={"text": "You write code."}),
    codex(1, "turn_context", model="m"),
    codex(2, "response_item", type="message", role="user", content=[{"type": "input_text", "text": "List files."}]),
    codex(5, "response_item", type="reasoning", summary=[], encrypted_content="zzz"),
    codex(6, "response_item", type="function_call", name="shell", arguments='{"command": "ls"}', call_id="k1"),
    codex(6, "event_msg", **count(31)),
    codex(8, "response_item", type="function_call_output", call_id="k1", output="a.py"),
    codex(9, "response_item", type="message", role="assistant", content=[{"type": "output_text", "text": "a.py"}]),
    codex(9, "event_msg", **count(7)),
    codex(20, "compacted", message="The user listed files."),
    codex(30, "response_item", type="message", role="user", content=[{"type": "input_text", "text": "And now?"}]),
    codex(33, "response_item", type="message", role="assistant", content=[{"type": "output_text", "text": "Nothing."}]),
]  # fmt: skip


SHAREGPT = [
    {"id": "a_0", "conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."},
                                    {"from": "human", "value": "Bye."}, {"from": "gpt", "value": "Bye."}]},
    {"id": "a_1", "conversations": [{"from": "gpt", "value": "As I said."}, {"from": "human", "value": "What?"},
                                    {"from": "gpt", "value": "Moss."}]},
]  # fmt: skip

WILDCHAT = {
    "conversation_hash": "h", "model": "m", "timestamp": "2023-04-09T00:00:30+00:00", "turn": 2,
    "conversation": [
        {**USER, "timestamp": None}, {**SAYS, "timestamp": "2023-04-09T00:00:10+00:00"},
        {**THANKS, "timestamp": None}, {**OPENS, "timestamp": "2023-04-09T00:00:30+00:00"},
    ],
}  # fmt: skip
LMSYS = {"conversation_id": "l", "model": "m", "turn": 1, "conversation": [USER, SAYS]}

SAMPLES: dict[str, str] = {
    "mooncake": lines([BLOCKS]),
    "bailian": lines([{**BLOCKS, "chat_id": 4, "parent_chat_id": -1}]),
    "chat": json.dumps([{"id": "v", "messages": [USER, SAYS, THANKS, OPENS]}]),  # as vLLM's multi-turn benchmark has it
    "taubench": json.dumps([{"task_id": 3, "trial": 1, "traj": [USER, SAYS]}]),
    "openai-batch": lines(
        [
            {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "m", "messages": [USER, SAYS, THANKS], "max_tokens": 9}},
            {"custom_id": "2", "method": "POST", "url": "/v1/responses",
             "body": {"model": "m", "instructions": "Be brief.", "input": "Where is it?"}},
        ]
    ),
    "sharegpt": json.dumps(SHAREGPT),
    "chat-logs": lines([WILDCHAT, LMSYS]),
    "claude-code": lines(CLAUDE),
    "codex": lines(CODEX),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n"
             "2023-11-16 18:17:04.0319600,396,109\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
                "45,GPT-4,1087,230,1317,Conversation log\n",
}  # fmt: skip
