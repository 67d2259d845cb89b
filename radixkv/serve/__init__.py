"""An OpenAI-compatible server over one engine; `radixkv serve MODEL` runs it. Needs the extra `radixkv[serve]`.

app.py        which path leads to which endpoint
service.py    what all endpoints share
settings.py   what a server is told when it starts
schemas.py    bodies, checked; fields.py and messages.py do the reading
auth.py       API keys to tenants, tenants to namespaces
limits.py     how much may be asked at once
conversations.py  whole conversations to prompts that begin as the last one ended; history.py keeps what was said
metrics.py    what Prometheus reads; request_watch.py counts requests as they end
frame.py      request ids, the log, an answer whatever goes wrong
errors.py     errors in OpenAI's shape
"""

try:
    import starlette  # noqa: F401  (only to see whether it is there)
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("serving needs more packages: pip install 'radixkv[serve]'") from error

from radixkv.serve.app import create_app
from radixkv.serve.settings import Settings

__all__ = ["Settings", "create_app"]
