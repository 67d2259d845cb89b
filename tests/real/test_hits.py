"""A chat of 20 turns computes its new tokens only, counted exactly."""

from __future__ import annotations

from radixkv import Engine, SamplingParams
from tests.real.conftest import Figure
from tests.real.conversations import QUESTIONS
from tests.real.reference import Reference

TURNS = 20


def test_each_turn_computes_the_new_message_and_one_token_more(
    engine: Engine, reference: Reference, figure: Figure
) -> None:
    """Each turn hits all earlier tokens but the last sampled one, whose KV does not exist before this turn.

    So it computes that token, the end of the last reply if `max_tokens` cut it off, the new message, and the sampled
    tokens but the last.
    """
    encode = lambda text: engine.model.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    params = SamplingParams(temperature=0, max_tokens=16)
    chat = engine.chat("You answer in one short sentence.", namespace="twenty turns")
    prompts = cached = 0
    answers = []
    for turn in range(TURNS):
        text, before = QUESTIONS[turn], chat.token_ids
        stats = engine.stats()
        reply = chat.send(text, params)
        prompt = chat.token_ids[: -len(reply.token_ids)]
        if not turn:
            assert reply.usage.cached_tokens == 0
        else:
            end = "\n" if before[-1] in engine.model.stop_token_ids else "<|im_end|>\n"
            new = encode(f"{end}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
            assert prompt == [*before, *new]
            assert reply.usage.cached_tokens == len(before) - 1
            assert reply.usage.computed_tokens == 1 + len(new) + len(reply.token_ids) - 1
        assert reply.usage.prompt_tokens == len(prompt)
        now = engine.stats()
        assert now.cached_tokens - stats.cached_tokens == reply.usage.cached_tokens
        assert now.computed_tokens - stats.computed_tokens == reply.usage.computed_tokens
        prompts, cached = prompts + len(prompt), cached + reply.usage.cached_tokens
        answers.append((prompt, reply.token_ids))
    compared = reference.compare(answers)
    figure(f"a chat of {TURNS} turns: {cached:,} of {prompts:,} prompt tokens hit ({cached / prompts:.1%})")
    figure(f"  {compared}")
    assert compared.forwards == 1
    assert not compared.mismatches
