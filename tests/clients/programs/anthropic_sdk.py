"""The anthropic package: messages, the stream helper, a tool, and the count of tokens.

    python anthropic_sdk.py URL MODEL

Prints the turns of each conversation, as [prompt, cached, output] tokens.
"""

import json
import sys

from anthropic import Anthropic

url, model = sys.argv[1:]
client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}]
conversations = []


def tokens(usage):
    prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return [prompt, usage.cache_read_input_tokens, usage.output_tokens]


def talk():
    system, messages = "You are Tom.", [{"role": "user", "content": "My name is Nora."}]
    counted = client.messages.count_tokens(model=model, system=system, messages=messages)
    first = client.messages.create(model=model, system=system, messages=messages, max_tokens=100)
    assert (first.content[0].text, first.stop_reason) == ("Hello Nora!", "end_turn")
    assert counted.input_tokens == tokens(first.usage)[0]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "What is my name?"}]
    with client.messages.stream(model=model, system=system, messages=messages, max_tokens=100) as stream:
        assert "".join(stream.text_stream) == "Your name is Nora."
        second = stream.get_final_message()
    conversations.append([tokens(first.usage), tokens(second.usage)])


def tool():
    options = {"model": model, "tools": TOOLS, "max_tokens": 100}
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    with client.messages.stream(**options, messages=messages) as stream:
        first = stream.get_final_message()
    (call,) = first.content
    assert (call.name, call.input, first.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**options, messages=messages)
    assert second.content[0].text == "Take a hat."
    conversations.append([tokens(first.usage), tokens(second.usage)])


talk()
tool()
print(json.dumps(conversations))
