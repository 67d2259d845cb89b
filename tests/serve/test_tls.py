"""Https, also while the model loads, with a certificate that the openssl program makes; wrong files are refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import httpx
import openai
import pytest

from radixkv import Engine
from radixkv.cli import main
from radixkv.errors import InvalidInput
from radixkv.serve import Settings, server
from tests.engine.fakes import make_engine
from tests.serve.served import ASKED, fake_model, hosted, says

CERTIFICATE = ["-out", "cert.pem", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem and key.pem, and with keys that a server refuses."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program is missing")
    folder = tmp_path_factory.mktemp("tls")
    for arguments in (
        ["req", "-x509", *NEW_KEY, *CERTIFICATE],
        ["pkey", "-in", "key.pem", "-aes256", "-passout", "pass:secret", "-out", "encrypted.pem"],
        ["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "other.pem"],
    ):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
    return folder


def options(folder: Path, cert: str = "cert.pem", key: str = "key.pem") -> list[str]:
    return ["serve", "tiny", "--port", "0", "--tls-cert", str(folder / cert), "--tls-key", str(folder / key)]


def test_clients_speak_https(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))
    settings = Settings(drain_timeout=5, tls_cert=str(folder / "cert.pem"), tls_key=str(folder / "key.pem"))
    with hosted(settings, brain=says("Hello Nora.")) as host:
        url = host.url.replace("http:", "https:")
        assert httpx.get(f"{url}/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{host.url}/health")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chat: Any = client.chat.completions.create
            assert chat(model="fake", messages=ASKED).choices[0].message.content == "Hello Nora."
            events = list(chat(model="fake", messages=ASKED, stream=True))
        assert "".join(each.choices[0].delta.content or "" for each in events) == "Hello Nora."


def test_the_command_answers_by_https_from_the_load_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ports: list[str] = []

    def load(*_: Any, **__: Any) -> Engine:
        ports.extend(re.findall(r"port (\d+) answers with status 503", capsys.readouterr().err))
        with httpx.Client(base_url=f"https://127.0.0.1:{ports[0]}") as client:
            assert client.get("/health").json()["phase"] == "loading the model"
            assert client.post("/v1/messages", content=bytes(1 << 20)).status_code == 503
        return make_engine(num_blocks=64, model=fake_model())[0]

    def start(engine: Any, settings: Settings, on_ready: Any, on_cut: Any) -> NoReturn:
        on_ready()
        raise InvalidInput("end of the test")

    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))
    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(server, "Server", start)
    assert main(options(folder)) == 2
    assert capsys.readouterr().err == f"radixkv: fake at https://127.0.0.1:{ports[0]}/v1\nradixkv: end of the test\n"


@pytest.mark.parametrize(
    ("cert", "key", "reason"),
    [
        ("missing.pem", "key.pem", "--tls-cert .*: .* No such file or directory: '.*/missing.pem'"),
        ("cert.pem", "missing.pem", "--tls-key .*: .* No such file or directory: '.*/missing.pem'"),
        ("key.pem", "key.pem", "--tls-cert .*key.pem is no PEM file with a CERTIFICATE"),
        ("cert.pem", "cert.pem", "--tls-key .*cert.pem is no PEM file with a PRIVATE KEY"),
        ("cert.pem", "encrypted.pem", "--tls-key .* is encrypted: write it without a password"),
        ("cert.pem", "other.pem", "--tls-key .*other.pem .*does not match --tls-cert .*key values mismatch"),
    ],
)
def test_wrong_files_are_refused_before_the_model_loads(
    folder: Path, cert: str, key: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert main(options(folder, cert, key)) == 2
    assert re.fullmatch(f"radixkv: .*{reason}.*\n", capsys.readouterr().err)
    with (
        pytest.raises(InvalidInput, match="tls_"),
        hosted(Settings(tls_cert=f"{folder}/{cert}", tls_key=f"{folder}/{key}")),
    ):
        pytest.fail("the server started")
