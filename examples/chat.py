"""A conversation that branches: the common prefix of two branches is computed once.

python examples/chat.py
"""

from radixkv import Engine, SamplingParams

greedy = SamplingParams(temperature=0)

with Engine.load("tiny") as engine:  # or a folder, a GGUF file, or a name on the hub
    chat = engine.chat("You are Mira.")
    for text in ("My name is Nora and I live in Oslo.", "I have a green boat.", "What color is my boat?"):
        print(f"you:  {text}\nMira: ", end="")
        for chunk in (stream := chat.stream(text, greedy)):
            print(chunk.text, end="", flush=True)
        usage = stream.reply.usage
        print(f"    ({usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached)")

    [branch] = chat.fork()  # costs no KV: both go on from the same cached prefix
    print("branch:", branch.send("What do you know about me?", greedy).text)
    print("edited:", chat.edit(2, "I have a red boat.", greedy).text)  # drops the turns after it
    print("chat:  ", chat.send("What color is my boat?", greedy).text)

    # Why is this prompt (not) in the cache? Asking changes nothing.
    print(engine.probe([{"role": "system", "content": "You are Otto."}, {"role": "user", "content": "Hello!"}]))
