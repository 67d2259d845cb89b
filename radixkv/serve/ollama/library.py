"""The models as Ollama's API lists them: tags, ps, show and version; and the requests to change them."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from radixkv import __version__
from radixkv.engine.chat_prompts import template_text
from radixkv.serve.bodies import read
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import JsonObject
from radixkv.serve.ollama.lines import timestamp
from radixkv.serve.ollama.model_files import ModelFacts, facts_of
from radixkv.serve.ollama.schemas import ShowBody
from radixkv.serve.served_models import Models, ModelStatus

API_VERSION = "0.32.15"  # of Ollama, whose API this is: clients refuse an old one
_FOR_EVER = timedelta(days=36_500)
_THINKS = ("think>", "enable_thinking", "reasoning")  # texts in templates of models that think
_INSTEAD = {
    "pull": "radixkv serve MODEL serves a folder, a GGUF file, or a name on the hub, which it fetches",
    "push": "the hub's own tools upload files",
    "create": "radixkv serve FILE --model-name NAME serves a GGUF file or a folder by a name",
    "copy": "radixkv serve MODEL --model-name NAME gives a model another name",
    "delete": "stop the server, and delete the files of the model",
    "blobs": "radixkv serve FILE serves a GGUF file",
}
REFUSED = [(f"/api/{verb}", "POST") for verb in ("pull", "push", "create", "copy", "embed", "embeddings")]
REFUSED += [("/api/delete", "DELETE"), ("/api/blobs/{digest}", "POST"), ("/api/blobs/{digest}", "HEAD")]
"""Paths and methods that are refused, with what to do instead."""


async def version(_: Models, __: Request) -> Response:
    """Return the version of Ollama's API, for clients that need a recent one, and the server's own. Needs no key."""
    return _json({"version": API_VERSION, "radixkv": __version__})


async def tags(models: Models, request: Request) -> Response:
    """Return the models, each under all its names."""
    models.gate.caller(request)
    found = [(each, await asyncio.to_thread(facts_of, each.source)) for each in models.statuses()]
    return _json({"models": [_card(name, *each) for each in found for name in (each[0].name, *each[0].aliases)]})


async def ps(models: Models, request: Request) -> Response:
    """Return the loaded models, and when each will be unloaded if it stays idle."""
    models.gate.caller(request)
    loaded = [each for each in models.statuses() if each.service]
    return _json({"models": [_process(each, await asyncio.to_thread(facts_of, each.source)) for each in loaded]})


async def show(models: Models, request: Request) -> Response:
    """Return one model: its chat template, its metadata and its capabilities; raise ApiError 404."""
    with ExitStack() as cleanup:
        models.gate.admit(request, cleanup)
        body = await models.gate.read(request, partial(read, ShowBody))
        models.gate.caller(request)  # refuses a wrong namespace
        model = models.find(body.model)
        facts = await asyncio.to_thread(facts_of, model.source)
    context = {} if model.context is None else {f"{facts.family or 'model'}.context_length": model.context}
    template, fills = facts.template, any(key.startswith("tokenizer.ggml.fim_") for key in facts.info)
    if model.service is not None:
        template, fills = template_text(model.service.engine.model.codec), model.service.fim.available
    card, can = _card(model.name, model, facts), capabilities(template, fills=fills)
    shown = {"template": template, "model_info": {**facts.info, **context}, "capabilities": can}
    return _json({"modified_at": card["modified_at"], "details": card["details"], **shown})


async def refused(models: Models, request: Request) -> Response:
    """Raise ApiError 501, or 400 for embeddings."""
    models.gate.caller(request)
    verb = request.url.path.split("/")[2]
    if verb not in _INSTEAD:
        raise ApiError(400, "this server has no embeddings", code="unsupported")
    raise ApiError(501, f"this server cannot do that: {_INSTEAD[verb]}", code="not_implemented")


def capabilities(template: str, *, fills: bool) -> list[str]:
    """Return the capabilities of a model with this chat template, which `fills` in the middle or does not.

    >>> capabilities("{% if tools %}...{% endif %}<think>", fills=False)
    ['completion', 'tools', 'thinking']
    """
    thinks = any(text in template for text in _THINKS)
    found = {"completion": True, "tools": "tools" in template, "thinking": thinks, "insert": fills}
    return [name for name, can in found.items() if can]


def _card(name: str, model: ModelStatus, facts: ModelFacts) -> JsonObject:
    """Return the fields of all lists. Ollama's names have tags, on which some clients depend."""
    name = name if ":" in name else f"{name}:latest"
    parameters = f"{facts.parameters / 1e9:.1f}B" if facts.parameters >= 10**9 else f"{facts.parameters / 1e6:.1f}M"
    family = {"family": facts.family, "families": [facts.family], "parameter_size": parameters}
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(datetime.fromtimestamp(facts.modified or model.created, UTC)),
        "size": facts.size,
        "digest": facts.digest,
        "details": {"parent_model": "", "format": facts.format, **family, "quantization_level": facts.quantization},
    }


def _process(model: ModelStatus, facts: ModelFacts) -> JsonObject:
    assert model.service is not None
    size = facts.size if model.memory is None else model.memory
    left = _FOR_EVER if model.idle_left is None else timedelta(seconds=model.idle_left)
    on_gpu = model.service.engine.model.device.type != "cpu"
    more = {"size": size, "size_vram": size if on_gpu else 0, "expires_at": timestamp(datetime.now(UTC) + left)}
    return {**_card(model.name, model, facts), **more, "context_length": model.context or 0}


def _json(body: JsonObject) -> Response:
    # Escaped to ASCII, since metadata may have half of a surrogate pair.
    return Response(json.dumps(body), media_type="application/json")
