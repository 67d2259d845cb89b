"""openai-agents: one call of a tool, by the Responses API, which is its default, and by chat completions.

    python openai_agents.py URL MODEL

Prints the turns of each conversation, as [prompt, cached, output] tokens.
"""

import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

url, model = sys.argv[1:]
set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120))
asked = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "It is sunny"


conversations = []
for api, name in (("responses", "Ben"), ("chat_completions", "Eva")):
    if api != "responses":
        set_default_openai_api(api)
    agent = Agent(name=name, instructions=f"You are {name}.", model=model, tools=[get_weather])
    result = Runner.run_sync(agent, "How is the weather in Paris?")
    assert result.final_output == "Take a hat.", result
    usages = [each.usage for each in result.raw_responses]
    conversations.append(
        [[each.input_tokens, each.input_tokens_details.cached_tokens, each.output_tokens] for each in usages]
    )
assert asked == ["Paris", "Paris"]
print(json.dumps(conversations))
