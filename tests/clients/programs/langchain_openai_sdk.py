"""langchain-openai: invoke, stream and a bound tool, by chat completions and by the Responses API.

    python langchain_openai_sdk.py URL MODEL

Prints the turns of each conversation, as [prompt, cached, output] tokens.
"""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "It is sunny"


def tokens(message):
    usage = message.usage_metadata
    return [usage["input_tokens"], usage["input_token_details"].get("cache_read", 0), usage["output_tokens"]]


def text(message):
    """Return the text of a message, which is a list of blocks with the Responses API."""
    content = message.content
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


conversations = []
for uses_responses, name in ((False, "Joe"), (True, "Liz")):
    options = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}
    chat = ChatOpenAI(**options, use_responses_api=uses_responses, stream_usage=True)
    messages = [SystemMessage(f"You are {name}."), HumanMessage("My name is Nora.")]
    first = chat.invoke(messages)
    assert text(first) == "Hello Nora!", first
    messages += [first, HumanMessage("What is my name?")]
    second = None
    for chunk in chat.stream(messages):
        second = chunk if second is None else second + chunk
    assert text(second) == "Your name is Nora.", second
    conversations.append([tokens(first), tokens(second)])

    bound = chat.bind_tools([get_weather])
    messages = [SystemMessage(f"You are {name}."), HumanMessage("How is the weather in Paris?")]
    first = bound.invoke(messages)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    messages += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    second = bound.invoke(messages)
    assert text(second) == "Take a hat.", second
    conversations.append([tokens(first), tokens(second)])
print(json.dumps(conversations))
