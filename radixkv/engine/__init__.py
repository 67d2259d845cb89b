"""The engine: requests in, completions out. It schedules, computes and samples on one thread.

Read in this order:

engine.py           RequestEngine, the public methods; connects the parts
assembly.py         makes the parts that follow from model and settings
input_processor.py  arguments of a call to requests
chat_prompts.py     prompts of chat messages: template, control tokens, date
engine_thread.py    the thread that owns cache and model, and the client that posts calls to it
core.py             schedule, transfer, forward, commit, sample, finish
steps.py            finish steps one after the other, or overlapped; publish KV at once or late
forward.py          the interface of a model's forward, as a core calls it
scheduler.py        the tokens of the next step
transfers.py        copies before the forward: offloads to host memory and loads
wait_queue.py       the order of waiting requests; requests that wait for a shared prefix
admission.py        how many blocks a request needs, and which request is preempted
reuse_policy.py     which cached tokens a request uses and publishes; deterministic or not
request.py          a request and its streams, and how a stream gets its next token
request_facts.py    facts of a request: sender, parts of the prompt, notes of scheduler and reports
constrained.py      the continuation of a stream whose text follows a grammar
beams.py            the same for the beams of a search
text_stream.py      the text of a stream, and its stop strings
draws.py            draws the next tokens of a step, and scores its prompts
scores.py           scores of a prompt's tokens, computed chunk by chunk and kept for later prompts
score_batch.py      the requests of engine.score
output.py           results, the channel that carries them, and the caller's handle
fault_isolation.py  ends only the requests that cause an exception
audit.py            recomputes cached KV, compares, and drops differing blocks
audit_reads.py      cached runs of all tiers, read for an audit
compressed.py       compressed prefixes, which some requests name
async_engine.py     AsyncRequestEngine and AsyncHandle, for asyncio
runs.py             cached runs that move between engines
kv_facts.py         the facts that decide the bits of cached KV
observers/          telemetry records, monitoring, trace recording
stats.py            counters, EngineStats and AuditReport
latency.py          histograms
"""

from radixkv.engine.async_engine import AsyncHandle, AsyncRequestEngine
from radixkv.engine.compressed import CompressedPrefix
from radixkv.engine.engine import RequestEngine
from radixkv.engine.output import Chunk, Completion, Handle, Usage, Warmed
from radixkv.engine.request_facts import Origin
from radixkv.engine.runs import Run
from radixkv.engine.score_batch import Score
from radixkv.engine.stats import AuditReport, Difference, EngineStats

__all__ = [
    "AsyncHandle",
    "AsyncRequestEngine",
    "AuditReport",
    "Chunk",
    "Completion",
    "CompressedPrefix",
    "Difference",
    "EngineStats",
    "Handle",
    "Origin",
    "RequestEngine",
    "Run",
    "Score",
    "Usage",
    "Warmed",
]
