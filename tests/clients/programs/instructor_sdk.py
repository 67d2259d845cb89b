"""instructor: an object from a call that its default mode requires.

    python instructor_sdk.py URL MODEL

Prints the turns of each conversation, as [prompt, cached, output] tokens.
"""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


raw = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
client = instructor.from_openai(raw)
person, completion = client.chat.completions.create_with_completion(
    model=model,
    response_model=Person,
    max_retries=0,
    messages=[{"role": "user", "content": "Extract: Nora is 30 years old."}],
)
assert (person.name, person.age) == ("Nora", 30), person
usage = completion.usage
print(json.dumps([[[usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens]]]))
