"""Hold conversations over the engine: append-only token histories, branches, tool calls.

Read in this order:
messages.py           tool calls, tool results, replies
session.py            ChatSession: turns, fork, rewind, edit; saved.py, its state as a JSON file
reply_stream.py       the reply to one message; session_use.py, the check for calls of two threads at once
engine.py             Engine: RequestEngine with chat() and resume(); async_chat.py, the same for asyncio
template.py           messages to token ids without encoding sampled text again; rendering.py, messages to text
reply_form.py         the way a template writes replies, found by rendering marks
splicing.py           a rendered history with the sampled ids in it
history_mode.py       appending or rendering again, tried with the dialogues of template_cases.py
constrained.py        the grammar of a constrained reply; reply_schema.py, schemas of answers and their parsed objects
reply_parser.py       replies to text, thinking and calls; calls/ and thinking.py, their formats
"""

from radixkv.chat.async_chat import AsyncChatSession, AsyncEngine, AsyncReplyStream
from radixkv.chat.engine import Engine
from radixkv.chat.messages import Reply, ToolCall, ToolResult
from radixkv.chat.reply_stream import ReplyStream
from radixkv.chat.session import ChatSession

__all__ = [
    "AsyncChatSession",
    "AsyncEngine",
    "AsyncReplyStream",
    "ChatSession",
    "Engine",
    "Reply",
    "ReplyStream",
    "ToolCall",
    "ToolResult",
]
