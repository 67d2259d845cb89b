"""Replay the users of recorded conversations against your model, each in a session of its own, and count cached tokens.

    python traces/chat_replay.py                              # three conversations that ship with the package
    python traces/chat_replay.py chats.jsonl --model my/model # OpenAI-style messages, one conversation a line

Only the users' messages are taken from the recording: the model answers, and the next turn continues its own answer.
(`radixkv-replay run` sends recorded prompts as they are, and measures; this script is an example for programs of your
own.)
"""

import argparse
from itertools import groupby

from radixkv import Engine, SamplingParams
from radixkv_traces.formats import open_trace, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", help="a file of conversations; default: the sample")
    parser.add_argument("--model", default="tiny", help="'tiny' (bundled), a local folder, a GGUF file, or a hub name")
    parser.add_argument("--max-tokens", type=int, default=48, help="most tokens of a reply")
    options = parser.parse_args()
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0)

    with Engine.load(options.model) as engine:
        # A request for each recorded reply; a conversation's last one has all messages except that reply.
        for name, calls in groupby(open_trace(options.trace or sample("chat")), key=lambda call: call.session):
            *_, last = calls
            system = [message for message in last.messages if message["role"] in ("system", "developer")]
            # `with` ends the conversation: cached tokens that only it used are then evicted first.
            with engine.chat(messages=system) as chat:
                print(f"\n{name}")
                for message in last.messages:
                    if message["role"] == "user":
                        reply = chat.send(message["content"], params)
                        usage = reply.usage
                        print(f"  > {message['content']}\n    {reply.text}")
                        print(f"    [{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached]")
        stats = engine.stats()
        print(f"\nhit rate {stats.hit_rate:.0%}: {stats.computed_tokens} tokens computed, {stats.cached_tokens} found")


if __name__ == "__main__":
    main()
