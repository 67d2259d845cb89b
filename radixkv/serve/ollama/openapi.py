"""Paths and schemas of Ollama's API, for the OpenAPI document."""

from __future__ import annotations

from radixkv.serve.bodies import Body
from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schemas import COUNT, STRING, TEXT, answer, array, ref
from radixkv.serve.ollama.library import REFUSED
from radixkv.serve.ollama.lines import MEDIA_TYPE
from radixkv.serve.ollama.schemas import GenerateBody, OllamaChatBody, ShowBody
from radixkv.serve.openapi_operations import get, header, json_of, post, responses_of, without_key

BODIES: tuple[type[Body], ...] = (OllamaChatBody, GenerateBody, ShowBody)
_ERROR = "OllamaError"
_DIGEST = {**header("digest", "path", "Of a file."), "required": True}


def paths() -> JsonObject:
    """The operations by their paths."""
    found: JsonObject = {
        "/api/chat": _lines("Continue a conversation, in the form of Ollama's API", OllamaChatBody, "OllamaChat"),
        "/api/generate": _lines("Answer a prompt, or continue a text", GenerateBody, "Generation"),
        "/api/show": post("One model", ShowBody, "OllamaModel", error=_ERROR),
        "/api/tags": get("The models, by all their names", json_of("Tags"), 401, 403, error=_ERROR),
        "/api/ps": get("The loaded models", json_of("Processes"), 401, 403, error=_ERROR),
        "/api/version": without_key(get("Version of Ollama's API", json_of("OllamaVersion"), error=_ERROR)),
    }
    for path, method in REFUSED:
        statuses = responses_of("", {}, 401, 403, 400 if "embed" in path else 501, error=_ERROR)
        del statuses["200"]
        about = {"summary": "Refused; the error says what to do instead", "responses": statuses}
        operation = {**about, "parameters": [_DIGEST] if "{digest}" in path else []}
        found.setdefault(path, {})[method.lower()] = operation
    return found


def answers() -> JsonObject:
    """The schemas of the responses, by the names that `ref` takes."""
    function = answer({"name": TEXT, "arguments": {"type": "object"}})
    message = answer(
        {"role": {"const": "assistant"}, "content": TEXT},
        thinking=TEXT,
        tool_calls=array(answer({"id": TEXT, "function": function}), least=1),
    )
    details = dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), TEXT)
    card = {"modified_at": TEXT, "details": answer({**details, "families": array(TEXT)})}
    listed = {**card, **dict.fromkeys(("name", "model", "digest"), TEXT), "size": COUNT}
    running = {**listed, "expires_at": TEXT, "size_vram": COUNT, "context_length": COUNT}
    can: JsonObject = {"enum": ["completion", "tools", "thinking", "insert"]}
    shown = {**card, "template": TEXT, "model_info": {"type": "object"}, "capabilities": array(can)}
    return {
        "OllamaChat": _answer({"message": message}),
        "Generation": _answer({"response": TEXT}, thinking=TEXT),
        "OllamaModel": answer(shown),
        "Tags": answer({"models": array(answer(listed))}),
        "Processes": answer({"models": array(answer(running))}),
        "OllamaVersion": answer({"version": TEXT, "radixkv": TEXT}),
        _ERROR: answer({"error": TEXT}),
    }


def _answer(said: JsonObject, **optional: JsonObject) -> JsonObject:
    """A line or a whole response; the last line and the response have the counts, with durations in nanoseconds."""
    head = {"model": TEXT, "created_at": TEXT, "done": {"type": "boolean"}}
    counts = [f"{each}_{kind}" for each in ("prompt_eval", "eval") for kind in ("count", "duration")]
    counts += ["total_duration", "load_duration", "cached_prompt_count"]
    return answer({**head, **said}, **dict.fromkeys(counts, COUNT), done_reason=STRING, **optional)


def _lines(about: str, body: type[Body], name: str) -> JsonObject:
    operation = post(about, body, name, error=_ERROR)
    content: JsonObject = {"anyOf": [ref(name), ref(_ERROR)]}
    text = {"type": "string", "contentMediaType": MEDIA_TYPE, "contentSchema": content}
    described = {"schema": text, "description": "Unless stream=false: one JSON object in each line."}
    operation["post"]["responses"]["200"]["content"][MEDIA_TYPE] = described
    return operation
