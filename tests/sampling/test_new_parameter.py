"""A new sampling parameter is one declaration and one logits processor: everything else follows from these two."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import radixkv.serve
from radixkv.sampling import logits_processors
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import SampleRow, SamplingParams, parameter
from radixkv.sampling.sampler import sample
from radixkv.settings.kinds import Integer
from tests.serve.served import Served, served


@dataclass(frozen=True)
class MoreParams(SamplingParams):
    only_token: int = parameter(
        -1, Integer(low=-1, high=10_000, wire_high=1000), "sample no other token", adjusts_logits=True
    )


class OnlyToken:
    reads_history = False

    def applies(self, params: SamplingParams) -> bool:
        assert isinstance(params, MoreParams)
        return params.only_token >= 0

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        for values, row in zip(logits, rows, strict=True):
            assert isinstance(row.params, MoreParams)
            keep = values[row.params.only_token].clone()
            values.fill_(-torch.inf)[row.params.only_token] = keep


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every module of radixkv see the new field, as if SamplingParams itself declared it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("radixkv") and vars(module).get("SamplingParams") is SamplingParams:
            monkeypatch.setattr(module, "SamplingParams", MoreParams)
    monkeypatch.setattr(logits_processors, "PROCESSORS", [*logits_processors.PROCESSORS, OnlyToken()])


@pytest.fixture
def server(added: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose bodies are declared again, with the new field."""
    monkeypatch.setattr(radixkv, "serve", radixkv.serve)  # importing again replaces it
    for name in [each for each in sys.modules if each.startswith("radixkv.serve") or each == "tests.serve.served"]:
        monkeypatch.delitem(sys.modules, name)
    with importlib.import_module("tests.serve.served").served() as found:
        yield found


def test_the_sampler_applies_it_to_its_row_alone(added: None) -> None:
    logits = torch.arange(10.0).repeat(2, 1)
    rows = [SampleRow(MoreParams(temperature=0, only_token=3), 0, 0), SampleRow(MoreParams(temperature=0), 0, 0)]
    assert sample(logits, rows).tokens == [3, 9]
    assert DeviceSampler(logits.device).begin(logits, rows).result().tokens == [3, 9]


def test_the_engine_takes_it(server: Served) -> None:
    [reply] = server.engine.generate(["Hello"], MoreParams(only_token=5, max_tokens=3))
    assert reply.token_ids == (5, 5, 5)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_clients_may_send_it_in_its_narrower_range(server: Served, path: str) -> None:
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": "fake", **prompt, "max_tokens": 3}
    answer = server.post(path, {**body, "only_token": 5}).json()
    text = server.engine.model.tokenizer.decode([5, 5, 5])
    [choice] = answer["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) == text
    wrong = server.post(path, {**body, "only_token": 1001})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "only_token"
    assert wrong.json()["error"]["message"].startswith("only_token must be ") and "1000" in wrong.text


def test_the_document_describes_it(server: Served) -> None:
    document = server.client.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        found = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]["only_token"]
        assert found["description"] == "sample no other token"
        assert all(each in json.dumps(found) for each in ('"integer"', '"minimum": -1', '"maximum": 1000', '"null"'))


def test_nothing_has_it_unless_it_is_declared() -> None:
    with served() as server:
        answer = server.post("/v1/completions", {"model": "fake", "prompt": "x", "only_token": 5})
    assert answer.status_code == 200 and answer.headers["warning"] == '299 radixkv "ignored: only_token"'
