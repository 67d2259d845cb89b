"""The client in docs/telemetry_protocol.md finds an engine and adds up its frames."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.telemetry.served import many, serving

PAGE = Path(__file__).parents[2] / "docs" / "telemetry_protocol.md"


def test_the_client_on_the_page_works(tmp_path):
    (client,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with serving() as (publisher, engine):
        engine.change(*many(3000))
        publisher.flight(tmp_path / "a.rec")  # waits for a collection
        environment = {"XDG_RUNTIME_DIR": str(publisher.path.parent.parent), "TMPDIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", client], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
    assert done.stdout == "tiny has 3000 nodes after 1.0 steps\n"
