"""Chat templates of several kinds, which differ in how they render earlier turns."""

from __future__ import annotations

from tests.chat.worlds import CHATML, THINKING

# Like Mistral's: the system prompt and the tools are in the last user turn.
MISTRAL = """{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{%- set last = namespace(at=0) %}
{%- for m in said %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{{- '<|endoftext|>' }}
{%- for m in said %}
{%- if m.role == 'user' %}
{%- if loop.index0 == last.at and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]
{%- if loop.index0 == last.at and messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}
{%- for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function | tojson }}{% endfor %}<|im_end|>
{%- endif %}
{%- endfor %}"""

STYLES = {"ChatML": CHATML, "thinking": THINKING, "Mistral": MISTRAL}

# Like Qwen3's: thinking may be a field or part of the content, and only replies after the last user turn keep it.
QWEN = """{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}

Tools: {{ tools | tojson }}{% endif %}<|im_end|>
{% endif %}
{%- set last = namespace(at=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role != 'system' or not loop.first %}
{%- set content = m.content or '' %}
{%- set thinking = m.reasoning_content or '' %}
{%- if m.role == 'assistant' and '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and thinking and loop.index0 > last.at %}<think>
{{ thinking }}
</think>

{% endif %}{{ content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
