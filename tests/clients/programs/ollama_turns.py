"""What the programs for Ollama's API share: what the model answers, and the turns, which are printed at the end."""

import atexit
import json

CITY = {"city": "Paris"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
done = []
atexit.register(lambda: print(json.dumps(done)))


def tokens(answer):
    return [answer.prompt_eval_count, answer.eval_count]
