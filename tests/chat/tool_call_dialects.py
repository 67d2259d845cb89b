"""Models that write tool calls, each in its way: a template in the style of its kind, and replies by a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.chat.worlds import byte_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "now")
]

QWEN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The calls are a list after one tag; ids have exactly nine letters and digits.
MISTRAL_LIST = """{{- '<s>' }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS]' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}]</s>
{%- else %}{{ m.content }}</s>
{%- endif %}
{%- endfor %}"""

# Each call has a tag of its own, and its name stands before its arguments; words may stand before them all.
MISTRAL_NAMED = """{{- '<s>' }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}</s>
{%- endif %}
{%- endfor %}"""

# One call a turn, without any tag; results are said by "ipython".
LLAMA = """{{- '<|begin_of_text|>' }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

{{ tools | tojson }}<|eot_id|>{% endif %}
{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- {'name': call.name, 'parameters': call.arguments} | tojson }}
{%- else %}{{ m.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""


# Each argument has tags of its own, and a text stands there without quotes.
CODER = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Keys are bare, and texts have a quote of their own.
GEMMA = """{%- macro write(value) -%}
{%- if value is string %}<|"|>{{ value }}<|"|>
{%- elif value is mapping %}{{ '{' }}{% for key, each in value | items %}{{ key }}:{{ write(each) }}
{{- ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- elif value is iterable %}[{% for each in value %}{{ write(each) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ value | tojson }}
{%- endif %}
{%- endmacro %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] -%}
<|tool_call>call:{{ call.function.name }}{{ write(call.function.arguments) }}<tool_call|>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Dialect:
    """A template, its control tokens, the text before a reply, and how the model writes calls."""

    template: str
    controls: tuple[str, ...]
    openings: tuple[str, ...]
    stop: str
    write: Callable[[list[tuple[str, dict[str, Any]]]], str]
    most_calls: int = 2

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = byte_tokenizer(self.template)
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.controls)})
        return tokenizer

    def stops(self) -> frozenset[int]:
        return frozenset({self.tokenizer().convert_tokens_to_ids(self.stop)})

    def brain(self, reply: Callable[[str], str]) -> Callable[[list[int]], int]:
        """Says `reply(all that was said)`, letter by letter, as no tokenizer would, and stops."""
        tokenizer = self.tokenizer()
        openings = [tokenizer.encode(text, add_special_tokens=False) for text in self.openings]
        (stop,) = self.stops()
        begun: list[tuple[list[int], list[int]]] = []  # prompts, and the replies to them

        def next_token(tokens: list[int]) -> int:
            for prompt, ids in reversed(begun):
                if tokens[: len(prompt)] == prompt and ids[: len(tokens) - len(prompt)] == tokens[len(prompt) :]:
                    return ids[len(tokens) - len(prompt)]
            prompt = tokens[: max(_behind_last(opening, tokens) for opening in openings)]
            said = reply(tokenizer.decode(prompt, skip_special_tokens=False))
            begun.append((prompt, [*self.spelled(tokenizer, said), stop]))
            return begun[-1][1][len(tokens) - len(prompt)]

        return next_token

    def spelled(self, tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
        for control in self.controls:
            before, found, after = text.partition(control)
            if found:
                return [
                    *self.spelled(tokenizer, before),
                    tokenizer.convert_tokens_to_ids(control),
                    *self.spelled(tokenizer, after),
                ]
        return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]


def _behind_last(part: list[int], tokens: list[int]) -> int:
    return max((at for at in range(len(part), len(tokens) + 1) if tokens[at - len(part) : at] == part), default=0)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: list[tuple[str, dict[str, Any]]]) -> str:
    written = [_json({"name": name, "arguments": given}) for name, given in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def _mistral_list(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return f"[TOOL_CALLS]{_json([{'name': name, 'arguments': given} for name, given in calls])}"


def _mistral_named(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


def _llama(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return "; ".join(_json({"name": name, "parameters": given}) for name, given in calls)


def _coder(calls: list[tuple[str, dict[str, Any]]]) -> str:
    def argument(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"

    rows = [(name, "".join(argument(*each) for each in given.items())) for name, given in calls]
    return "\n".join(f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>" for name, given in rows)


def _gemma(calls: list[tuple[str, dict[str, Any]]]) -> str:
    def write(value: Any) -> str:
        match value:
            case str():
                return f'<|"|>{value}<|"|>'
            case dict():
                return "{" + ",".join(f"{key}:{write(each)}" for key, each in value.items()) + "}"
            case list():
                return "[" + ",".join(map(write, value)) + "]"
        return _json(value)

    return "".join(f"<|tool_call>call:{name}{write(given)}<tool_call|>" for name, given in calls)


_CHATML = ("<|im_start|>assistant\n",)
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")

DIALECTS = {
    "Qwen": Dialect(QWEN, (), _CHATML, "<|im_end|>", _hermes),
    "Qwen, tags as control tokens": Dialect(QWEN, ("<tool_call>", "</tool_call>"), _CHATML, "<|im_end|>", _hermes),
    "Mistral, a list": Dialect(MISTRAL_LIST, _MISTRAL, ("[/INST]", "[/TOOL_RESULTS]"), "</s>", _mistral_list),
    "Mistral, by name": Dialect(MISTRAL_NAMED, _MISTRAL, ("[/INST]", "[/TOOL_RESULTS]"), "</s>", _mistral_named),
    "Qwen3-Coder": Dialect(CODER, (), _CHATML, "<|im_end|>", _coder),
    "Gemma 4": Dialect(GEMMA, ("<|tool_call>", "<tool_call|>", '<|"|>'), _CHATML, "<|im_end|>", _gemma),
    "Llama": Dialect(LLAMA, _LLAMA, ("assistant<|end_header_id|>\n\n",), "<|eot_id|>", _llama, most_calls=1),
}
