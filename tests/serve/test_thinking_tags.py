"""Thinking in a template's own tags, control tokens included, is separated over HTTP, too."""

from __future__ import annotations

from tests.chat.test_live_styles import Scripted
from tests.chat.test_traced_replies import OWN, OWN_TAGS, tokenizer_of
from tests.serve.served import CHAT, fake_model, served, texts


def test_thinking_and_answer_come_apart_and_the_next_prompt_has_the_answer_only() -> None:
    tokenizer = tokenizer_of(OWN_TAGS, *OWN)
    stops = frozenset(tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    model = fake_model(tokenizer=tokenizer, vocab_size=len(tokenizer), stop_token_ids=stops)
    reply = tokenizer.encode("<|muse>deep\nHm, so.\n<muse|>Hello, you.<|im_end|>", add_special_tokens=False)
    with served(model=model, brain=Scripted([reply] * 3)) as server:
        told = server.events("/v1/chat/completions", CHAT)
        assert texts(told) == {0: "Hello, you."}
        assert texts(told, "reasoning_content") == {0: "Hm, so."}
        said = server.chat()["choices"][0]["message"]
        assert (said["reasoning_content"], said["content"]) == ("Hm, so.", "Hello, you.")
        messages = [*CHAT["messages"], said, {"role": "user", "content": "again"}]
        usage = server.chat(messages=messages)["usage"]
        plain = [{key: each[key] for key in ("role", "content")} for each in messages]
        written = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        assert usage["prompt_tokens"] == len(tokenizer.encode(written, add_special_tokens=False))
