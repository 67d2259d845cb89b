"""The engine: requests in, completions out. Schedules, runs and commits on one thread; knows no conversation.

engine.py         RequestEngine: what callers use; puts the parts together
async_engine.py   AsyncRequestEngine: the same for asyncio
intake.py         from what a caller passes to a request
worker.py         the one thread that owns cache and model
core.py           schedule -> run -> commit
scheduler.py      what the next step computes, and who is admitted
request.py        a request and its streams
reuse.py          what of the cache is used and left there; deterministic or not
audit.py          computes cached KV again and compares; quarantine.py drops what differs, audit_report.py tells
limits.py, waiting.py, coalescing.py, demand.py, preemption.py: the scheduler's rules
guard.py, chat_template.py, pinned_date.py: messages to text, on the day when a conversation began
handle.py, async_handle.py, outputs.py, text_stream.py, prompts.py, sizing.py, stats.py, warmed.py
"""

from radixkv.engine.async_engine import AsyncRequestEngine
from radixkv.engine.async_handle import AsyncHandle
from radixkv.engine.audit_report import AuditReport, Difference
from radixkv.engine.engine import RequestEngine
from radixkv.engine.handle import Handle
from radixkv.engine.limits import Limits
from radixkv.engine.outputs import Chunk, Completion, Usage
from radixkv.engine.stats import EngineStats
from radixkv.engine.warmed import Warmed

__all__ = [
    "AsyncHandle",
    "AsyncRequestEngine",
    "AuditReport",
    "Chunk",
    "Completion",
    "Difference",
    "EngineStats",
    "Handle",
    "Limits",
    "RequestEngine",
    "Usage",
    "Warmed",
]
