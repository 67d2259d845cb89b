"""The engine: requests in, completions out. It schedules, runs and commits on one thread.

engine.py           RequestEngine: what callers use; puts the parts together
async_engine.py     AsyncRequestEngine and AsyncHandle: the same for asyncio
input_processor.py  prompts, messages and parameters to requests
engine_thread.py    the one thread that owns cache and model
core.py             schedule, run, commit
scheduler.py        the plan of the next step
wait_queue.py       the order of waiting requests; requests that wait for a shared prefix
admission.py        how many blocks a request needs; which request is preempted
reuse_policy.py     which cached tokens a request uses and which it leaves; deterministic or not
request.py          a request, its streams and their text
output.py           results, the channel that carries them, and a caller's handle
kv_scrub.py         computes cached KV again, compares, and drops what differs
observers/          telemetry records, monitoring, trace recording
sizing.py, stats.py
"""

from radixkv.engine.async_engine import AsyncHandle, AsyncRequestEngine
from radixkv.engine.engine import RequestEngine
from radixkv.engine.output import Chunk, Completion, Handle, Usage, Warmed
from radixkv.engine.stats import AuditReport, Difference, EngineStats

__all__ = [
    "AsyncHandle",
    "AsyncRequestEngine",
    "AuditReport",
    "Chunk",
    "Completion",
    "Difference",
    "EngineStats",
    "Handle",
    "RequestEngine",
    "Usage",
    "Warmed",
]
