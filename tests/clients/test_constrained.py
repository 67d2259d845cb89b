"""SDKs that ask for objects get valid ones from a model that writes at random, greedily and at temperature 1."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from radixkv.serve import Settings
from tests.clients.conftest import MODEL, Run
from tests.grammar.engines import RandomRunner
from tests.serve.served import Hosted, fake_model, hosted


@pytest.fixture(scope="module")
def host() -> Iterator[Hosted]:
    settings = Settings(port=0, model_name=MODEL, drain_timeout=5)
    model = fake_model(max_length=4000)
    with hosted(settings, num_blocks=2000, model=model, runner_class=RandomRunner) as found:
        yield found


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize(("environment", "count"), [("openai3", 13), ("openai2", 3)])
def test_objects_are_valid(environment: str, count: int, temperature: str, run_program: Run) -> None:
    output = run_program(f"constrained_{environment}.py", environment, temperature)
    assert len(json.loads(output.splitlines()[-1])) == count
