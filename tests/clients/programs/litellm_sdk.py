"""litellm: completions whole and streamed, as an OpenAI and as an Anthropic provider.

    python litellm_sdk.py URL MODEL

Prints the turns of each conversation, as [prompt, cached, output] tokens.
"""

import json
import sys

import litellm

url, model = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
conversations = []


def tokens(usage):
    return [usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, usage.completion_tokens]


for provider, base, name in (("openai", f"{url}/v1", "Max"), ("anthropic", url, "Zoe")):
    options = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "max_tokens": 100, "timeout": 120}
    messages = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": "My name is Nora."}]
    first = litellm.completion(**options, messages=messages)
    said = first.choices[0].message.content
    assert said == "Hello Nora!", first
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "What is my name?"}]
    chunks = list(litellm.completion(**options, messages=messages, stream=True, stream_options={"include_usage": True}))
    second = litellm.stream_chunk_builder(chunks, messages=messages)
    assert second.choices[0].message.content == "Your name is Nora.", second
    conversations.append([tokens(first.usage), tokens(second.usage)])

    messages = [{"role": "user", "content": f"{name} asks: how is the weather in Paris?"}]
    first = litellm.completion(**options, messages=messages, tools=TOOLS)
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages += [
        first.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "It is sunny"},
    ]
    second = litellm.completion(**options, messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "Take a hat.", second
    conversations.append([tokens(first.usage), tokens(second.usage)])
print(json.dumps(conversations))
