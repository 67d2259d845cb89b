"""A byte-level tokenizer with a ChatML template, and a fake model that answers by a script."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv.chat import Engine
from tests.engine.fakes import FakeModel, make_engine

CHATML = """{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }} Tools:
{%- for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Qwen3's: the thinking of replies before the last user's message is left out.
THINKING = """{%- set last = namespace(at=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < last.at %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """256 bytes, a few merges, ChatML's control tokens."""
    vocab = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ċ", "Ċ"), ("o", "u")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


class Script:
    """The next token of a reply, given the conversation; `reply` maps the last message's text to a text or to ids."""

    def __init__(self, tokenizer: Any, reply: Callable[[str], str | list[int]]) -> None:
        self.tokenizer, self.reply = tokenizer, reply
        self.replies: dict[tuple[int, ...], list[int]] = {}
        self.begin = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def __call__(self, tokens: list[int]) -> int:
        size = len(self.begin)
        at = next((i for i in range(len(tokens) - size, -1, -1) if tokens[i : i + size] == self.begin), -1) + size
        if at < size:  # no conversation
            return int(self.tokenizer.eos_token_id)
        prompt = tuple(tokens[: at - size])
        if prompt not in self.replies:
            self.replies[prompt] = self.answer(prompt)
        reply = self.replies[prompt]
        return reply[min(len(tokens) - at, len(reply) - 1)]  # the last one for a chunk that ends inside a later message

    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        text = self.tokenizer.decode(list(prompt), skip_special_tokens=False)
        reply = self.reply(text.rsplit("<|im_start|>", 1)[1].split("\n", 1)[1].removesuffix("<|im_end|>\n"))
        ids = self.tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else reply
        return [*ids, self.tokenizer.eos_token_id]


def echo(text: str) -> str:
    return f"You said {text}!"


_shared_tokenizer = cache(byte_tokenizer)  # what a template does is found out once for each tokenizer


def chat_engine(
    reply: Callable[[str], str | list[int]] = echo,
    *,
    template: str | None = CHATML,
    num_blocks: int = 2000,
    max_length: int = 10_000,
    **options: Any,
) -> Engine:
    tokenizer = _shared_tokenizer(template)
    stops = frozenset(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    model = FakeModel(tokenizer, len(tokenizer), max_length, stops)
    engine, _ = make_engine(num_blocks, 16, model=model, brain=Script(tokenizer, reply), **options)
    return engine


def rendered(engine: Engine, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """The plain template's text of a whole conversation whose last message is a reply, up to its stop token."""
    tokenizer = engine.model.tokenizer
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return list(tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False))
