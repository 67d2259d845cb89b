"""The lists of models in the form of Ollama's API, the facts in model files, and requests that are refused."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from radixkv import __version__
from radixkv.model_path import BUNDLED
from radixkv.serve import Settings
from radixkv.serve.ollama.library import REFUSED
from radixkv.serve.ollama.model_files import facts_of
from tests.gguf.raw_file import ARCHITECTURE, F32, STRING, U32, file_of, key, tensor
from tests.serve.served import Served, fake_model, served, tokenizer
from tests.serve.test_openapi import fits, responses


def found(server: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body) if body else server.client.get(path)
    assert answer.status_code == 200, answer.text
    content = responses(path, "post" if body else "get")["200"]["content"]["application/json"]
    assert fits(content["schema"], answer.json())
    return dict(answer.json())


def test_the_lists_have_the_facts_of_the_files():
    with served(Settings(model_name="tiny"), model=fake_model(name="tiny")) as server:
        [listed], [running] = found(server, "/api/tags")["models"], found(server, "/api/ps")["models"]
        shown = found(server, "/api/show", model="tiny:latest")
        assert shown == found(server, "/api/show", name="tiny")
        assert server.post("/api/show", {"model": "x"}).json()["error"].startswith("model 'x' not found")
        assert server.post("/api/show", {}).json()["error"] == "model is required"
    folder = BUNDLED["tiny"]
    assert listed["name"] == listed["model"] == running["name"] == "tiny:latest"
    assert listed["size"] == (folder / "model.safetensors").stat().st_size and running["size_vram"] == 0
    assert listed["details"]["parameter_size"] == "1.8M" and listed["details"]["quantization_level"] == "BF16"
    assert listed["details"] == running["details"] == shown["details"] and listed["details"]["family"] == "llama"
    assert running["context_length"] == shown["model_info"]["llama.context_length"] == 2000  # the server's limit
    assert (
        shown["model_info"]["general.parameter_count"] == 1_771_200 and shown["template"] == tokenizer().chat_template
    )
    assert shown["capabilities"] == ["completion", "tools"]
    assert datetime.fromisoformat(running["expires_at"]).year > datetime.fromisoformat(listed["modified_at"]).year + 90


def test_a_gguf_file_is_described_by_its_header(tmp_path: Path):
    path, template = tmp_path / "model.gguf", "{% if tools %}{% endif %}<think>"
    keys = [ARCHITECTURE, key("llama.context_length", U32, 512), key("llama.eps", F32, float("nan"))]
    keys += [key("tokenizer.chat_template", STRING, template), key("general.name", STRING, b"\x01\0\0\0\0\0\0\0\xff")]
    path.write_bytes(file_of(keys, [tensor("a.weight", (8,)), tensor("b.weight", (32, 2), 8, 32)], data=128))
    facts = facts_of(str(path))
    assert (facts.format, facts.family, facts.quantization, facts.parameters) == ("gguf", "llama", "Q8_0", 72)
    assert (facts.size, facts.template) == (path.stat().st_size, template)
    assert facts.info["llama.context_length"] == 512 and "llama.eps" not in facts.info
    assert facts_of(str(tmp_path)) == facts_of(str(path)) == facts
    os.utime(path, (1e9, 1e9))
    changed = facts_of(str(path))
    assert changed.modified == 1e9 and changed.digest != facts.digest and changed.info == facts.info


@pytest.mark.parametrize("source", ["org/model-that-is-not-cached", "/nowhere", "a b", ""])
def test_a_model_without_files_is_listed_without_facts(source: str):
    facts = facts_of(source)
    assert (facts.size, facts.family, facts.info, facts.template) == (0, "", {}, "") and len(facts.digest) == 64


def test_requests_to_change_the_models_name_the_command_that_does_it():
    keys = Settings(api_keys={"ada": "ada-secret-1"})
    with served(keys) as server:
        for path, method in REFUSED:
            for headers, status in (({}, 401), ({"X-Api-Key": "ada-secret-1"}, 400 if "embed" in path else 501)):
                answer = server.client.request(method, path, headers=headers)
                assert answer.status_code == status and (method == "HEAD" or [*answer.json()] == ["error"])
        answer = server.post("/api/pull", {"model": "x"}, headers={"X-Api-Key": "ada-secret-1"})
        assert "radixkv serve MODEL" in answer.json()["error"]
        assert server.client.get("/api/version").json()["radixkv"] == __version__
        assert server.client.get("/api/unknown").json()["error"].startswith("unknown path")


def test_a_browser_and_a_probe_see_that_a_server_runs():
    with served() as server:
        assert server.client.get("/", headers={"Accept": "text/html,*/*"}).text == "radixkv is running"
        assert server.client.get("/").json() == {"name": "radixkv", "version": __version__}
        assert server.client.head("/").status_code == 200
