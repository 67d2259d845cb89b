"""Agents that fork from one long prompt and call tools, all at once: the prompt is computed once and kept once.

python examples/forked_agents.py
"""

from radixkv import Engine, SamplingParams, ToolResult

PRICES = {"lamp": (12, "C"), "kettle": (24, "B"), "tent": (60, "H"), "rope": (5, "G")}
MANUAL = """\
You are Mira, the assistant of the Harbor Shop in Lisbon.
Answer from this manual. Use a tool for the weather, for the stock, for orders and for large numbers.
The shop opens at 9 and closes at 18.
Delivery takes 3 days and costs 5 coins.
Products:
""" + "\n".join(f"- {item}: {price} coins, shelf {shelf}" for item, (price, shelf) in PRICES.items())
CHECK_STOCK = {
    "type": "function",
    "function": {
        "name": "check_stock",
        "description": "How many of an item are in stock.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
STOCK = {"lamp": 4, "kettle": 14, "tent": 7, "rope": 31}
greedy = SamplingParams(temperature=0)

with Engine.load("tiny") as engine:
    first = engine.chat(MANUAL, tools=[CHECK_STOCK])
    first.send("Hello!", greedy)  # from here on the manual is cached
    agents = first.fork(len(STOCK))

    # stream() returns at once, so the requests of all agents run as one batch; wait() gives the whole reply.
    streams = [
        agent.stream(f"How many {item}s are in stock?", greedy) for agent, item in zip(agents, STOCK, strict=True)
    ]
    for agent, stream in zip(agents, streams, strict=True):
        reply = stream.wait()
        while reply.tool_calls:
            results = [
                ToolResult(call.id, {"item": call.arguments["item"], "stock": STOCK[call.arguments["item"]]})
                for call in reply.tool_calls
            ]
            reply = agent.tool_results(results, greedy)
        print(f"{reply.text}    ({reply.usage.cached_tokens} of {reply.usage.prompt_tokens} prompt tokens were cached)")

    stats = engine.stats()
    print(f"hit rate {stats.hit_rate:.0%}: {stats.computed_tokens} tokens computed, {stats.cached_tokens} found")
