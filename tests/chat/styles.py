# ruff: noqa: RUF001 - DeepSeek's control tokens have wide bars
"""Chat templates in the styles of real models, each with plain functions that write the expected texts.

A style is a template and a set of functions for the text that the model must see. The functions use neither the
template nor the rendering code, so that a rendered history can be compared with their texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """{%- if tools %}<|im_start|>system
{{ messages[0].content ~ '\n' if messages[0].role == 'system' }}Tools: {{ tools | tojson }}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- '
' if not loop.first }}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The date is the template's; tools stand in the first user's turn; one call at a time; texts are trimmed.
LLAMA3 = """{{- bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' ~ date_string ~ '\n\n' ~ system ~ '<|eot_id|>' }}
{%- for m in said %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model makes one tool call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' ~ call.name ~ '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end_header_id|>\n\n' }}
{%- if loop.first and tools %}{{ 'Use these functions: ' ~ (tools | tojson) ~ '\n\n' }}{% endif %}
{{- m.content | trim }}{{ '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# No generation prompt, a space in front of answers, tools before the last user's turn, ids of nine letters, turns that
# alternate.
MISTRAL = """{{- bos_token }}
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{%- if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}
{%- set last = namespace(at=-1, role='assistant') %}
{%- for m in said %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in said %}
{%- if m.role == 'user' %}
{%- if last.role == 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if loop.index0 == last.at and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('Ids of tool calls have 9 letters') }}{% endif %}
{{- '[TOOL_RESULTS]' ~ ({'content': m.content, 'call_id': m.tool_call_id} | tojson) ~ '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Ids of tool calls have 9 letters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{{- ', ' if not loop.last }}
{%- endfor %}
{{- ']' ~ eos_token }}
{%- else %}
{{- ' ' ~ m.content ~ eos_token }}
{%- endif %}
{%- if m.role in ('user', 'assistant') %}{% set last.role = m.role %}{% endif %}
{%- endfor %}"""

# The thinking of replies before the last user's message is left out; results share a user's turn.
QWEN3 = """{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
{%- if tools %}{{ '\n\n# Tools\n' ~ (tools | tojson) }}{% endif %}<|im_end|>
{% endif %}
{%- set last = namespace(at=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages if m.role != 'system' %}
{%- set at = loop.index0 + (1 if messages[0].role == 'system' else 0) %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
{{- '
<tool_response>
' ~ m.content ~ '
</tool_response>' }}
{{- '<|im_end|>
' if loop.last or loop.nextitem.role != 'tool' }}
{%- else %}
{%- set thinking = m.reasoning_content or '' %}
{%- set content = m.content or '' %}
{%- if '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}<|im_start|>assistant
{% if at > last.at and (loop.last or thinking) %}<think>
{{ thinking }}
</think>

{% endif %}{{ content }}
{%- for call in m.tool_calls or [] %}
{{- '\n' if content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Channels: the model samples their headers; thinking stays until the turn's last message; a call names its recipient.
GPT_OSS = """<|start|>system<|message|>Knowledge cutoff: 2024-06
Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>
{%- if tools or messages[0].role == 'system' %}<|start|>developer<|message|>
{{- messages[0].content if messages[0].role == 'system' }}
{%- if tools %}{{ '\n\n# Tools\n' ~ (tools | tojson) }}{% endif %}<|end|>
{%- endif %}
{%- set called = namespace(name=none) %}
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in said %}
{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}
{%- if called.name is none %}{{ raise_exception('A result needs a call before it') }}{% endif %}
{{- '<|start|>functions.' ~ called.name ~ ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}<|end|>
{%- elif m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('Content and thinking before a call: pass one') }}{% endif %}
{%- set final = namespace(follows=false) %}
{%- for later in said[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}{% set final.follows = true %}{% endif %}
{%- endfor %}
{%- if (m.content or m.thinking) and not final.follows %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ (m.content or m.thinking) ~ '<|end|>' }}
{%- endif %}
{%- set called.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' ~ called.name ~ '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}
{%- set called.name = none %}
{%- if loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# A prompt opens the thinking; nothing separates turns; the arguments of calls are texts; no turn begins after results.
DEEPSEEK = """{{- bos_token }}
{%- set state = namespace(results=false) %}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\n\n## Tools\n' ~ (tools | tojson) }}{% endif %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'user' %}
{%- set state.results = false %}
{{- '<｜User｜>' ~ m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' if not state.results }}
{%- set state.results = true %}
{{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' }}
{{- '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem.role != 'tool' }}
{%- else %}
{{- '<｜Assistant｜>' if not state.results }}
{%- set state.results = false %}
{{- m.content.split('</think>')[-1] if m.content }}
{%- if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not state.results %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

Calls = Sequence[tuple[str, str, dict[str, Any]]]  # id, name, arguments


@dataclass(frozen=True, repr=False)
class Style:
    """A template, its tokens, and the expected texts.

    `opening(system, tools)` comes first, then the turns: `user(said, tools)`, with the tools in the first one, or
    `results`; `begin` at the end of a prompt; the sampled reply, as `says`, `thinks` and `calls` spell it; and `close`.
    """

    name: str
    template: str
    control: tuple[str, ...]
    words: tuple[str, ...]  # tokens that are no control tokens
    stops: tuple[str, ...]
    bos: str
    opening: Callable[[str, str], str]
    user: Callable[[str, str], str]
    results: Callable[[Calls, Sequence[str]], str]
    begin: str
    close: str
    says: Callable[[str], str]
    thinks: Callable[[str], str]
    calls: Callable[[Calls], str]
    begin_behind_results: str | None = None
    call_stop: str | None = None
    parallel: bool = True
    repeats_tools: bool = False  # in front of each user's turn that is new
    strips: bool = False

    def __repr__(self) -> str:
        return self.name

    @cache  # noqa: B019 - there are six of these, and they live as long as the tests do
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Bytes, a few merges, and the control tokens."""
        vocab = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ċ", "Ċ"), ("o", "u"), ("Ġ", "y"), (">", "Ċ")]
        for pair in merges:
            vocab["".join(pair)] = len(vocab)
        raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens([AddedToken(text, special=True) for text in self.control])
        raw.add_tokens([AddedToken(text, special=False) for text in self.words])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=self.stops[0], bos_token=self.bos)
        tokenizer.chat_template = self.template
        return tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer().convert_tokens_to_ids(list(self.stops)))


NEED = "I need it."
BLANK, HEADING, DEEP_HEADING = "\n\n", "\n\n# Tools\n", "\n\n## Tools\n"


def _tools(tools: str, before: str = "Tools: ", behind: str = "") -> str:
    return before + tools + behind if tools else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_json({'name': n, 'arguments': a})}\n</tool_call>" for _, n, a in calls)


def _chatml_opening(system: str, tools: str) -> str:
    lines = [line for line in (system, _tools(tools)) if line]
    return "<|im_start|>system\n" + "\n".join(lines) + "<|im_end|>\n" if lines else ""


def _qwen_opening(system: str, tools: str) -> str:
    if not (system or tools):
        return ""
    return f"<|im_start|>system\n{system}{_tools(tools, HEADING)}<|im_end|>\n"


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as the template of gpt-oss writes it, which models write in another order."""
    return f" to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments)}"


def sampled_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as gpt-oss samples it."""
    return _channel(name, _json(arguments))


def _channel(recipient: str, body: str) -> str:
    return f"<|channel|>commentary to=functions.{recipient} <|constrain|>json<|message|>{body}"


def _gpt_oss_opening(system: str, tools: str) -> str:
    developer = f"<|start|>developer<|message|>{system}{_tools(tools, HEADING)}<|end|>"
    date = "2025-12-31"
    front = f"<|start|>system<|message|>Knowledge cutoff: 2024-06\nCurrent date: {date}<|end|>"
    return front + (developer if system or tools else "")


DATE = "31 Dec 2025"
STYLES = {
    style.name: style
    for style in (
        Style(
            "ChatML",
            CHATML,
            control=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
            words=(),
            stops=("<|im_end|>", "<|endoftext|>"),
            bos="<|endoftext|>",
            opening=_chatml_opening,
            user=lambda said, _: f"<|im_start|>user\n{said}<|im_end|>\n",
            results=lambda _, results: "".join(f"<|im_start|>tool\n{each}<|im_end|>\n" for each in results),
            begin="<|im_start|>assistant\n",
            close="<|im_end|>\n",
            says=str,
            thinks=lambda said: f"<think>\nHmm, {said}?\n</think>\n\n{said}",
            calls=_hermes,
        ),
        Style(
            "Llama 3",
            LLAMA3,
            control=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
            words=(),
            stops=("<|eot_id|>",),
            bos="<|begin_of_text|>",
            opening=lambda system, _: f"<|begin_of_text|>{_header('system')}Today Date: {DATE}\n\n{system}<|eot_id|>",
            user=lambda said, tools: (
                f"{_header('user')}{_tools(tools, 'Use these functions: ', BLANK)}{said.strip()}<|eot_id|>"
            ),
            results=lambda _, results: "".join(f"{_header('ipython')}{each.strip()}<|eot_id|>" for each in results),
            begin=_header("assistant"),
            close="<|eot_id|>",
            says=str,
            thinks=lambda said: f"<think>\nHmm, {said}?\n</think>\n\n{said}",
            calls=lambda calls: "".join(f'{{"name": "{n}", "parameters": {_json(a)}}}' for _, n, a in calls),
            parallel=False,
        ),
        Style(
            "Mistral",
            MISTRAL,
            control=(
                *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
                *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            ),
            words=(),
            stops=("</s>",),
            bos="<s>",
            opening=lambda system, _: "<s>" + (f"[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT]" if system else ""),
            user=lambda said, tools: f"{_tools(tools, '[AVAILABLE_TOOLS]', '[/AVAILABLE_TOOLS]')}[INST]{said}[/INST]",
            results=lambda calls, results: "".join(
                f"[TOOL_RESULTS]{_json({'content': each, 'call_id': number})}[/TOOL_RESULTS]"
                for (number, _, _), each in zip(calls, results, strict=True)
            ),
            begin="",
            close="</s>",
            says=lambda said: f" {said}",
            thinks=lambda said: f" <think>\nHmm, {said}?\n</think>\n\n{said}",
            calls=lambda calls: (
                f"[TOOL_CALLS][{', '.join(_json({'name': n, 'arguments': a, 'id': i}) for i, n, a in calls)}]"
            ),
            repeats_tools=True,
        ),
        Style(
            "Qwen3",
            QWEN3,
            control=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
            words=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            stops=("<|im_end|>", "<|endoftext|>"),
            bos="<|endoftext|>",
            opening=_qwen_opening,
            user=lambda said, _: f"<|im_start|>user\n{said}<|im_end|>\n",
            results=lambda _, results: (
                "<|im_start|>user"
                + "".join(f"\n<tool_response>\n{each}\n</tool_response>" for each in results)
                + "<|im_end|>\n"
            ),
            begin="<|im_start|>assistant\n",
            close="<|im_end|>\n",
            says=str,
            thinks=lambda said: f"<think>\nHmm, {said}?\n</think>\n\n{said}",
            calls=lambda calls: f"<think>\n{NEED}\n</think>\n\n{_hermes(calls)}",
            strips=True,
        ),
        Style(
            "gpt-oss",
            GPT_OSS,
            control=(
                *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
                "<|startoftext|>",
            ),
            words=(),
            stops=("<|return|>", "<|call|>"),
            bos="<|startoftext|>",
            opening=_gpt_oss_opening,
            user=lambda said, _: f"<|start|>user<|message|>{said}<|end|>",
            results=lambda calls, results: "".join(
                f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{_json(each)}<|end|>"
                for (_, name, _), each in zip(calls, results, strict=True)
            ),
            begin="<|start|>assistant",
            close="<|end|>",
            says=lambda said: f"<|channel|>final<|message|>{said}",
            thinks=lambda said: (
                f"<|channel|>analysis<|message|>Hmm, {said}?<|end|><|start|>assistant<|channel|>final<|message|>{said}"
            ),
            calls=lambda calls: (
                f"<|channel|>analysis<|message|>{NEED}<|end|><|start|>assistant"
                + _channel(calls[0][1], _json(calls[0][2]))
            ),
            call_stop="<|call|>",
            parallel=False,
            strips=True,
        ),
        Style(
            "DeepSeek",
            DEEPSEEK,
            control=(
                *(
                    "<｜begin▁of▁sentence｜>",
                    "<｜end▁of▁sentence｜>",
                    "<｜User｜>",
                    "<｜Assistant｜>",
                    "<｜tool▁sep｜>",
                ),
                *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
                *(
                    "<｜tool▁outputs▁begin｜>",
                    "<｜tool▁outputs▁end｜>",
                    "<｜tool▁output▁begin｜>",
                    "<｜tool▁output▁end｜>",
                ),
            ),
            words=("<think>", "</think>"),
            stops=("<｜end▁of▁sentence｜>",),
            bos="<｜begin▁of▁sentence｜>",
            opening=lambda system, tools: f"<｜begin▁of▁sentence｜>{system}{_tools(tools, DEEP_HEADING)}",
            user=lambda said, _: f"<｜User｜>{said}",
            results=lambda _, results: (
                "<｜tool▁outputs▁begin｜>"
                + "".join(f"<｜tool▁output▁begin｜>{each}<｜tool▁output▁end｜>" for each in results)
                + "<｜tool▁outputs▁end｜>"
            ),
            begin="<｜Assistant｜><think>\n",
            begin_behind_results="",
            close="<｜end▁of▁sentence｜>",
            says=lambda said: f"\n</think>\n\n{said}",
            thinks=lambda said: f"Hmm, {said}?\n</think>\n\n{said}",
            calls=lambda calls: (
                f"{NEED}\n</think>\n\n<｜tool▁calls▁begin｜>"
                + "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>" for _, n, a in calls)
                + "<｜tool▁calls▁end｜>"
            ),
            strips=True,
        ),
    )
}
