"""llm with llm-ollama: a conversation, a chain with a tool, and a schema.

    python ollama_llm.py URL MODEL

Prints the turns of each conversation, as [prompt, output] tokens.
"""

import os
import sys

url, model = sys.argv[1:]
os.environ["OLLAMA_HOST"] = url

import llm  # noqa: E402 - it reads the address
from ollama_turns import PERSON, done  # noqa: E402

found = llm.get_model(model)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "It is sunny"


def tokens(response):
    return [response.input_tokens, response.output_tokens]


for stream in (True, False):
    talk = found.conversation()
    first = talk.prompt("My name is Nora.", system=f"Stream {stream}.", stream=stream)
    assert first.text() == "Hello Nora!", first
    second = talk.prompt("What is my name?", stream=stream)
    assert second.text() == "Your name is Nora.", second
    done.append([tokens(first), tokens(second)])

    chain = found.conversation(tools=[get_weather]).chain(f"Stream {stream}: the weather in Paris?", stream=stream)
    assert chain.text() == "Take a hat."
    done.append([tokens(each) for each in chain._responses])

person = found.prompt("Who is 30?", schema=PERSON)
assert person.text() == '{"name": "Nora", "age": 30}', person
done.append([tokens(person)])
