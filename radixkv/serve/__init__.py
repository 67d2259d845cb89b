"""An OpenAI-compatible server over one engine; `radixkv serve MODEL` runs it. Needs the extra `radixkv[serve]`.

command.py        command-line options to settings; loading.py answers while the model is loaded
server.py         runs the server on a socket and shuts it down
app.py            routes; middleware.py adds request ids and the log; errors.py and error_forms.py write errors
access.py         API keys, namespaces, limits on streams and bodies; ../server_settings.py has the values
connections.py    counts connections and the share of each tenant; http_parser.py limits the heads of requests
schemas.py        request bodies as Pydantic models; bodies.py reads them, and openapi.py describes them
gate.py           admits requests and reads their bodies; served_models.py finds the model of a request
service.py        what endpoints share of one model; submit.py starts requests on its engine
chats.py          POST /v1/chat/completions; completions.py has /v1/completions and /tokenize
infill.py         POST /infill of llama.cpp; fim.py makes prompts that fill in the middle
reply.py          splits a reply into thinking, content and tool calls
responses.py      usage, whole bodies and event streams; token_texts.py writes log probabilities
conversations.py  prompts of conversations that begin as earlier ones ended; history.py remembers them
metrics.py        Prometheus metrics; request_watch.py counts requests
"""

try:
    import pydantic  # noqa: F401  (only to see whether they are there)
    import starlette  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("serving needs more packages: pip install 'radixkv[serve]'") from error

from typing import TYPE_CHECKING, Any

from radixkv.server_settings import Settings

if TYPE_CHECKING:
    from radixkv.serve.app import create_app

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> Any:
    """Import `create_app`, and torch with it, once it is used."""
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from radixkv.serve.app import create_app

    return create_app
