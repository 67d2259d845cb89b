"""An OpenAI-compatible server over one engine; `radixkv serve MODEL` runs it. Needs the extra `radixkv[serve]`.

command.py        arguments to settings; server.py runs it on a socket, and ends it
app.py            which path leads to which endpoint; openapi.py describes them, with openapi_requests.py and
                  openapi_answers.py for bodies, made of json_schema.py
service.py        what all endpoints share; settings.py what it is told, asking.py its requests
chats.py          conversations; completions.py  texts and token ids
schemas.py        bodies, checked; fields.py and messages.py do the reading
reply.py          a reply taken apart; tagged_text.py  with its control tokens
shapes.py         usage and log probabilities; stream.py  events
conversations.py  what was said before, found again; history.py remembers it, in a tree of history_nodes.py
auth.py           API keys to tenants, tenants to namespaces; limits.py  how much at once
metrics.py        what Prometheus reads; request_watch.py counts it
frame.py          request ids, the log, an answer whatever goes wrong; errors.py  in OpenAI's shape
"""

try:
    import starlette  # noqa: F401  (only to see whether it is there)
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("serving needs more packages: pip install 'radixkv[serve]'") from error

from radixkv.serve.app import create_app
from radixkv.serve.settings import Settings

__all__ = ["Settings", "create_app"]
