"""The ollama package: chats whole and streamed, with a tool, a format and thinking; generate, show, list and ps.

    python ollama_sdk.py URL MODEL

Prints the turns of each conversation, as [prompt, output] tokens: the package drops the count of cached ones.
"""

import sys

from ollama import Client, ResponseError
from ollama_turns import CITY, PERSON, done, tokens

url, model = sys.argv[1:]
client = Client(url)


def turn(messages, streamed=False, **options):
    """Add the reply to a conversation, and return it with its counts."""
    answer = client.chat(model=model, messages=messages, stream=streamed, **options)
    if not streamed:
        messages.append(answer.message)
        return answer.message, tokens(answer)
    *parts, last = answer
    message = {"role": "assistant", "content": "".join(part.message.content for part in parts)}
    message["tool_calls"] = [call for part in parts for call in part.message.tool_calls or ()] or None
    message["thinking"] = "".join(part.message.thinking or "" for part in parts) or None
    messages.append(message)
    return message, tokens(last)


def get_weather(city: str) -> str:
    """The weather in a city."""


for streamed in (False, True):
    messages = [
        {"role": "system", "content": f"Streamed: {streamed}."},
        {"role": "user", "content": "My name is Nora."},
    ]
    first, cost = turn(messages, streamed)
    assert first["content"] == "Hello Nora!", first
    messages.append({"role": "user", "content": "What is my name?"})
    second, more = turn(messages, not streamed)
    assert second["content"] == "Your name is Nora.", second
    done.append([cost, more])

    messages = [{"role": "user", "content": f"Streamed {streamed}: the weather in Paris?"}]
    first, cost = turn(messages, streamed, tools=[get_weather])
    (call,) = first["tool_calls"]
    assert (call.function.name, call.function.arguments) == ("get_weather", CITY), call
    messages.append({"role": "tool", "tool_name": "get_weather", "content": "It is sunny"})
    second, more = turn(messages, streamed, tools=[get_weather])
    assert second["content"] == "Take a hat.", second
    done.append([cost, more])

    messages = [{"role": "user", "content": f"Streamed {streamed}: think hard."}]
    first, cost = turn(messages, streamed, think=True)
    assert (first["thinking"], first["content"]) == ("Hm, so.", "It is 42."), first
    messages.append({"role": "user", "content": "What is my name?"})
    done.append([cost, turn(messages, streamed, think=True)[1]])

answer = client.chat(model=f"{model}:latest", messages=[{"role": "user", "content": "Who is 30?"}], format=PERSON)
assert answer.message.content == '{"name": "Nora", "age": 30}' and answer.done_reason == "stop", answer
done.append([tokens(answer)])
answer = client.generate(model=model, prompt="Who is 30?", format="json", keep_alive="5m", options={"num_ctx": 2000})
assert answer.response == '{"name": "Nora", "age": 30}', answer
done.append([tokens(answer)])
assert (
    client.chat(model=model).done_reason == "load"
    and client.generate(model=model, keep_alive=0).done_reason == "unload"
)
shown, (listed,), (running,) = client.show(model), client.list().models, client.ps().models
assert shown.capabilities == ["completion", "tools"] and shown.template and shown.modified_at, shown
assert listed.model == running.model == f"{model}:latest" and running.expires_at > listed.modified_at
statuses = []
for refused in (lambda: client.pull("x"), lambda: client.show("x"), lambda: client.embed("x")):
    try:
        refused()
    except ResponseError as error:
        statuses.append((error.status_code, error.error[:9]))
assert statuses == [(501, "this serv"), (404, "model 'x'"), (400, "this serv")], statuses
