"""instructor in its modes with a schema, and openai 2: objects from a model that writes at random.

    python constrained_openai2.py URL MODEL TEMPERATURE

Each reply must validate as a Person at once, without a retry. Prints the names of the ways that did.
"""

import json
import sys

import instructor
from openai import OpenAI
from person import Person, check, done

url, model, temperature = sys.argv[1], sys.argv[2], float(sys.argv[3])


asked = [{"role": "user", "content": "Nora is 30 years old."}]
shared = {"model": model, "temperature": temperature, "messages": asked, "max_tokens": 300}
with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as raw:
    for name, mode in (("default", {}), ("JSON_SCHEMA", {"mode": instructor.Mode.JSON_SCHEMA})):
        client = instructor.from_openai(raw, **mode)
        check(f"instructor, {name}", client.chat.completions.create(**shared, response_model=Person, max_retries=0))
    check("openai 2", raw.chat.completions.parse(**shared, response_format=Person).choices[0].message.parsed)
print(json.dumps(done))
