"""litellm's provider ollama_chat: completions whole and streamed, with a tool, a format and thinking.

    python ollama_litellm.py URL MODEL

Prints the turns of each conversation, as [prompt, output] tokens.
"""

import json
import sys

import litellm
from ollama_turns import CITY, PERSON, done

url, model = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def turn(messages, stream, **options):
    """Add the reply to a conversation, and return it with its counts."""
    answer = litellm.completion(
        model=f"ollama_chat/{model}", api_base=url, messages=messages, timeout=120, stream=stream, **options
    )
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message, [answer.usage.prompt_tokens, answer.usage.completion_tokens]


for stream in (False, True):
    messages = [{"role": "user", "content": f"Stream {stream}. My name is Nora."}]
    first, cost = turn(messages, stream, stream_options={"include_usage": True} if stream else None)
    messages.append({"role": "user", "content": "What is my name?"})
    second, more = turn(messages, stream)
    assert (first.content, second.content) == ("Hello Nora!", "Your name is Nora."), (first, second)
    done.append([cost, more])

    messages = [{"role": "user", "content": f"Stream {stream}: the weather in Paris?"}]
    first, cost = turn(messages, stream, tools=TOOLS)
    (call,) = first.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", CITY), call
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "It is sunny"})
    second, more = turn(messages, stream, tools=TOOLS)
    assert second.content == "Take a hat.", second
    done.append([cost, more])

    messages = [{"role": "user", "content": f"Stream {stream}: think hard."}]
    first, cost = turn(messages, stream, reasoning_effort="low")
    assert (first.reasoning_content, first.content) == ("Hm, so.", "It is 42."), first
    messages.append({"role": "user", "content": "What is my name?"})
    done.append([cost, turn(messages, stream, reasoning_effort="low")[1]])

form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
found, cost = turn([{"role": "user", "content": "Who is 30?"}], False, response_format=form)
assert json.loads(found.content) == {"name": "Nora", "age": 30}, found
done.append([cost])
