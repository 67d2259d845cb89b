"""Conversations over the engine: append-only token history, branches, tool calls. Knows no cache and no tensor.

engine.py         Engine: RequestEngine with chat() and resume()
session.py        ChatSession: turns, fork, rewind, edit
reply_stream.py   a reply while it is computed
async_engine.py   AsyncEngine: AsyncRequestEngine with chat() and resume()
async_session.py  the session's verbs, awaited
template.py       messages to token ids, never encoding again what was sampled; length.py, what is certainly too long
rendering.py      messages to text, text to ids
reply_form.py     how a template writes replies, found out by marks; call_arguments.py, the two forms of a call's
splicing.py       a history as its template writes it, with the sampled ids in it
appending.py      whether appending loses something, tried with the dialogues of canned.py
messages.py       tool calls, tool results, replies; channels.py, thinking in channels
reading.py        what a reply is taken for
tool_calls*.py    replies taken apart: _format, how models write calls; _block, where one ends; _json, what it asks for
saved.py          a session as a JSON file
"""

from radixkv.chat.async_chat import AsyncChatSession, AsyncEngine, AsyncReplyStream
from radixkv.chat.engine import Engine
from radixkv.chat.messages import Reply, ToolCall, ToolResult
from radixkv.chat.session import ChatSession, ReplyStream

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
