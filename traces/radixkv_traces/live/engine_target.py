"""A radixkv engine in this process, as the target of a replay. The only module of the package that imports torch."""

from __future__ import annotations

from typing import Any

from radixkv.chat import AsyncEngine
from radixkv.chat.generic_tools import calls_as_text
from radixkv.chat.rendering import Rendering
from radixkv.sampling.params import SamplingParams
from radixkv_traces.live.requests import Answer, Messages, Moment, OnPiece, PlannedRequest, TokenIds


class EngineTarget:
    """Send requests to an engine: greedy, and for exactly the recorded number of tokens, unless the context is full
    earlier.
    """

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        """The caller keeps the engine, and closes it."""
        self._engine = engine
        self._calls_as_text: bool | None = None
        self._sessions: dict[str, int] = {}
        self.name = name

    @classmethod
    async def load(cls, model: str, name: str, **options: Any) -> EngineTarget:
        """Load a model as `Engine.load` does, and answer one short request, so that nothing is compiled later."""
        engine = await AsyncEngine.load(model, **options)
        await engine.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        await engine.clear_cache()
        return cls(engine, name)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this number."""
        return self._engine.model.vocab_size

    async def send(self, request: PlannedRequest, prompt: TokenIds | Messages, on_piece: OnPiece) -> Answer:
        """Send one request and stream its answer."""
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0, ignore_eos=True)
        handle = await self._engine.submit(self._taken(prompt), params, session=self._session(request.session))
        async for _ in handle:
            on_piece()
        usage = (await handle.result()).usage
        return Answer(usage.output_tokens, usage.prompt_tokens, usage.cached_tokens, usage.preemptions)

    async def moment(self, at: float) -> Moment | None:
        """Return the state of the pool between two steps."""
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
        """Return the model, the device and the pool."""
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

    def _taken(self, prompt: TokenIds | Messages) -> TokenIds | Messages:
        """Return a prompt that the template takes: one without tools gets calls and results as text."""
        if not isinstance(prompt, list) or not any(message.get("tool_calls") for message in prompt):
            return prompt
        if self._calls_as_text is None:
            self._calls_as_text = not Rendering(self._engine.model.codec).writes_tools
        messages = [{**message, "content": message.get("content") or ""} for message in prompt]
        return [*calls_as_text(messages)] if self._calls_as_text else [*messages]

    def _session(self, name: str | None) -> int | None:
        return None if name is None else self._sessions.setdefault(name, len(self._sessions) + 1)
