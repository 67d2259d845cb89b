"""A radixkv engine of this process, asked by a replay. The only module of the package that loads torch.

Knows the engine's verbs. Knows no trace.
"""

from __future__ import annotations

from typing import Any

from radixkv.chat import AsyncEngine
from radixkv.sampling.params import SamplingParams
from radixkv_traces.live.requests import Answer, Ask, Messages, Moment, Seen, TokenIds


class EngineTarget:
    """Asks an engine; greedy, and for exactly as many tokens as were recorded, unless the context is full before."""

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        """The engine stays the caller's, to be closed there."""
        self._engine = engine
        self._sessions: dict[str, int] = {}
        self.name = name

    @classmethod
    async def load(cls, model: str, name: str, **options: Any) -> EngineTarget:
        """Load a model as `Engine.load` does, and answer one short request, so that nothing is built later."""
        engine = await AsyncEngine.load(model, **options)
        await engine.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        await engine.clear_cache()
        return cls(engine, name)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._engine.model.vocab_size

    async def ask(self, ask: Ask, prompt: TokenIds | Messages, seen: Seen) -> Answer:
        """Stream one request."""
        params = SamplingParams(max_tokens=ask.output_tokens, temperature=0, ignore_eos=True)
        handle = await self._engine.submit(prompt, params, session=self._session(ask.session))
        async for _ in handle:
            seen()
        usage = (await handle.result()).usage
        return Answer(usage.output_tokens, usage.prompt_tokens, usage.cached_tokens, usage.preemptions)

    async def moment(self, at: float) -> Moment | None:
        """The pool between two steps."""
        stats = await self._engine.stats()
        cache = stats.cache
        return Moment(
            at,
            cache.num_blocks - cache.free_blocks,
            cache.cached_blocks,
            cache.num_blocks,
            stats.running,
            stats.waiting,
            stats.prompt_tokens,
            stats.cached_tokens,
        )

    async def facts(self) -> dict[str, Any]:
        """What ran: model, device, pool."""
        stats = await self._engine.stats()
        return {
            "model": stats.model,
            "device": stats.device,
            "dtype": stats.dtype,
            "attention": stats.attention,
            "num_blocks": stats.cache.num_blocks,
            "block_size": stats.cache.block_size,
            "kv_bytes": stats.kv_bytes,
        }

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()

    def _session(self, name: str | None) -> int | None:
        return None if name is None else self._sessions.setdefault(name, len(self._sessions) + 1)
