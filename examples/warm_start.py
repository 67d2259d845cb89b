"""An engine that closes and is started again reads the conversation from disk.

python examples/warm_start.py
"""

import tempfile

from radixkv import Engine, SamplingParams

greedy = SamplingParams(max_tokens=16, temperature=0)
said = "You are a patient teacher of geometry. " * 80

with tempfile.TemporaryDirectory() as folder:  # a real one is private too: it holds text of users
    for start in ("first", "second"):
        with Engine.load("tiny", num_blocks=256, disk_cache=folder) as engine:
            usage = engine.generate([said], greedy)[0].usage
        print(
            f"{start} start: {usage.disk_tokens:,} of {usage.prompt_tokens:,} prompt tokens were read from disk, "
            f"first token after {usage.ttft_s * 1000:.0f} ms"
        )
