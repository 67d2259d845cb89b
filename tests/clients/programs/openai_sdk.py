"""The openai package: chat completions and responses, whole, streamed, with a tool, and continued by id.

    python openai_sdk.py URL MODEL

Prints the turns of each conversation, as [prompt, cached, output] tokens.
"""

import json
import sys

from openai import OpenAI

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS}
conversations = []


def chat_tokens(usage):
    return [usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens]


def response_tokens(usage):
    return [usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens]


def chat():
    messages = [{"role": "system", "content": "You are Mira."}, {"role": "user", "content": "My name is Nora."}]
    first = client.chat.completions.create(model=model, messages=messages)
    assert first.choices[0].message.content == "Hello Nora!", first
    messages += [first.choices[0].message, {"role": "user", "content": "What is my name?"}]
    stream = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Your name is Nora."
    conversations.append([chat_tokens(first.usage), chat_tokens(last.usage)])


def chat_tool():
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    first = client.chat.completions.create(model=model, messages=messages, tools=tools)
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny"}]
    second = client.chat.completions.create(model=model, messages=messages, tools=tools)
    assert second.choices[0].message.content == "Take a hat."
    conversations.append([chat_tokens(first.usage), chat_tokens(second.usage)])


def responses():
    first = client.responses.create(model=model, instructions="You are Ada.", input="My name is Nora.")
    assert first.output_text == "Hello Nora!"
    stream = client.responses.create(
        model=model,
        instructions="You are Ada.",
        input="What is my name?",
        previous_response_id=first.id,
        stream=True,
    )
    events = list(stream)
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "Your name is Nora."
    assert events[-1].type == "response.completed", events[-1]
    conversations.append([response_tokens(first.usage), response_tokens(events[-1].response.usage)])
    assert client.responses.retrieve(first.id).output_text == "Hello Nora!"
    client.responses.delete(first.id)


def responses_tool():
    tools = [{"type": "function", **FUNCTION, "strict": False}]
    items = [{"role": "user", "content": "Please look: how is the weather in Paris?"}]
    with client.responses.stream(model=model, input=items, tools=tools, store=False) as stream:
        stream.until_done()
        first = stream.get_final_response()
    (call,) = first.output
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny"}]
    second = client.responses.create(model=model, input=items, tools=tools, store=False)
    assert second.output_text == "Take a hat."
    conversations.append([response_tokens(first.usage), response_tokens(second.usage)])


for part in (chat, chat_tool, responses, responses_tool):
    part()
print(json.dumps(conversations))
