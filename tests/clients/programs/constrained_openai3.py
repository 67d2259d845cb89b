"""openai 3, anthropic, langchain and openai-agents: objects and forced calls from a model that writes at random.

    python constrained_openai3.py URL MODEL TEMPERATURE

Each reply must validate as a Person. Prints the names of the ways that did.
"""

import json
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled
from anthropic import Anthropic
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from person import Person, check, done

url, model, temperature = sys.argv[1], sys.argv[2], float(sys.argv[3])
options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}


asked = [{"role": "user", "content": "Nora is 30 years old."}]
shared = {"model": model, "temperature": temperature}
with OpenAI(**options) as client:
    reply = client.chat.completions.parse(**shared, messages=asked, response_format=Person, max_tokens=300)
    check("chat completions, parse", reply.choices[0].message.parsed)
    one = {"tools": [pydantic_function_tool(Person)], "parallel_tool_calls": False, "max_tokens": 300}
    reply = client.chat.completions.parse(**shared, messages=asked, tool_choice="required", **one)
    check("chat completions, required", reply.choices[0].message.tool_calls[0].function.parsed_arguments)
    reply = client.responses.parse(**shared, input=asked, text_format=Person, max_output_tokens=300)
    check("responses, parse", reply.output_parsed)

tool = {"name": "person", "description": "A person.", "input_schema": Person.model_json_schema()}
with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "person"}):
        more = {"tools": [tool], "tool_choice": choice, "max_tokens": 300, "extra_body": {"temperature": temperature}}
        message = client.messages.create(model=model, messages=asked, **more)
        assert message.stop_reason == "tool_use", message
        check(f"messages, {choice['type']}", Person.model_validate(message.content[0].input))

for uses_responses in (False, True):
    chat = ChatOpenAI(**options, **shared, use_responses_api=uses_responses, max_tokens=300)
    for method in ("json_schema", "function_calling", "json_mode"):
        if method == "json_mode":  # the schema is not sent: any object may come
            found = chat.with_structured_output(method=method).invoke("JSON of Nora.")
            assert isinstance(found, dict), found
            done.append(f"langchain, {method}, {uses_responses}")
        else:
            strict = {"strict": True} if method == "function_calling" else {}
            parser = chat.with_structured_output(Person, method=method, **strict)
            check(f"langchain, {method}, {uses_responses}", parser.invoke("Nora is 30 years old."))

set_tracing_disabled(True)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    served = kind(model=model, openai_client=AsyncOpenAI(**options))
    settings = ModelSettings(temperature=temperature, max_tokens=300)
    agent = Agent("Reader", instructions="Read.", model=served, output_type=Person, model_settings=settings)
    check(f"agents, {kind.__name__}", Runner.run_sync(agent, "Nora is 30 years old.").final_output)
print(json.dumps(done))
