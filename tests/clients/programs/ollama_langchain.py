"""langchain-ollama: invoke and stream, with a bound tool, a format and thinking.

    python ollama_langchain.py URL MODEL

Prints the turns of each conversation, as [prompt, output] tokens.
"""

import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from ollama_turns import CITY, PERSON, done

url, model = sys.argv[1:]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "It is sunny"


def tokens(message):
    return [message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]]


def streamed(chat, messages):
    whole = None
    for chunk in chat.stream(messages):
        whole = chunk if whole is None else whole + chunk
    return whole


for name, ask in (("Joe", lambda chat, messages: chat.invoke(messages)), ("Liz", streamed)):
    chat = ChatOllama(model=model, base_url=url, validate_model_on_init=True, num_ctx=4000)
    messages = [SystemMessage(f"You are {name}."), HumanMessage("My name is Nora.")]
    messages += [ask(chat, messages), HumanMessage("What is my name?")]
    last = ask(chat, messages)
    assert last.content == "Your name is Nora.", last
    done.append([tokens(messages[2]), tokens(last)])

    bound = chat.bind_tools([get_weather])
    messages = [HumanMessage(f"{name} asks: how is the weather in Paris?")]
    messages.append(ask(bound, messages))
    (call,) = messages[1].tool_calls
    assert (call["name"], call["args"]) == ("get_weather", CITY), call
    messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    last = ask(bound, messages)
    assert last.content == "Take a hat.", last
    done.append([tokens(messages[1]), tokens(last)])

    thinking = ChatOllama(model=model, base_url=url, reasoning=True)
    messages = [HumanMessage(f"{name}, think hard.")]
    messages += [ask(thinking, messages), HumanMessage("What is my name?")]
    assert messages[1].additional_kwargs["reasoning_content"] == "Hm, so.", messages[1]
    done.append([tokens(messages[1]), tokens(ask(thinking, messages))])

    found = ask(ChatOllama(model=model, base_url=url, format=PERSON), [HumanMessage("Who is 30?")])
    assert found.content == '{"name": "Nora", "age": 30}', found
    done.append([tokens(found)])
