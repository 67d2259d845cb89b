"""An agent over OpenAI's HTTP API. It sends the whole conversation with each request; the server finds it in the cache.

    radixkv serve tiny                # in one terminal; needs: pip install -e '.[serve]'
    python examples/agent_http.py     # in another;      needs: pip install openai

OPENAI_BASE_URL and OPENAI_API_KEY name another server and its key.
"""

import argparse
import json
import os
import sys

from openai import APIConnectionError, OpenAI

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

STOCK = {"lamp": 4, "kettle": 14, "tent": 7, "rope": 31}
MANUAL = """\
You are Mira, the assistant of the Harbor Shop in Lisbon.
Answer from this manual. Use a tool for the weather, for the stock, for orders and for large numbers.
The shop opens at 9 and closes at 18.
Delivery takes 3 days and costs 5 coins."""
CHECK_STOCK = {
    "type": "function",
    "function": {
        "name": "check_stock",
        "description": "How many of an item are in stock.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OPENAI_API_KEY", "none")  # a server on this machine only may have no keys

with OpenAI(base_url=url, api_key=key) as client:
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"There is no server at {url}. Start one in another terminal: radixkv serve tiny")
    messages = [{"role": "system", "content": MANUAL}]
    for item in STOCK:
        messages.append({"role": "user", "content": f"How many {item}s are in stock?"})
        while True:
            reply = client.chat.completions.create(
                model=model, messages=messages, tools=[CHECK_STOCK], temperature=0, prompt_cache_key="stock-agent"
            )
            usage, message = reply.usage, reply.choices[0].message
            messages.append(message)  # as it came: a reply that is sent back unchanged is not encoded again
            print(f"({usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached)")
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                wanted = json.loads(call.function.arguments)["item"]
                result = json.dumps({"item": wanted, "stock": STOCK.get(wanted, 0)})
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result}
                )
        print(message.content)
