"""A Dynamo frontend and workers on this machine: the commands, two conversations that hit, a server until Ctrl-C.

python examples/fleet.py --workers 2        in an environment with Dynamo, such as .fleet after `make fleet`
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of workers (default 2)")
parser.add_argument("--port", type=int, default=8000, help="port of the frontend (default 8000)")
parser.add_argument("--model", default="tiny", help="model of the workers (default tiny)")
parser.add_argument("--exit", action="store_true", help="stop after the two conversations")
options = parser.parse_args()
url = f"http://127.0.0.1:{options.port}/v1"


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def models():
    try:
        return [each["id"] for each in ask("models")["data"]]
    except urllib.error.URLError:
        return []


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with tempfile.TemporaryDirectory() as discovery:
    environment = {**os.environ, "DYN_FILE_KV": discovery, "DYN_LOG": "error", "DYN_TCP_RPC_HOST": "127.0.0.1"}
    frontend = "dynamo.frontend --router-mode kv --discovery-backend file --event-plane zmq --migration-limit 3"
    frontend += f" --http-host 127.0.0.1 --http-port {options.port}"
    worker = f"radixkv worker {shlex.quote(options.model)} --discovery-backend file"
    processes = []
    try:
        for command in (frontend, *[worker] * options.workers):
            print(f"DYN_FILE_KV={discovery} python -m {command} &", flush=True)
            arguments = [sys.executable, "-m", *shlex.split(command)]
            processes.append(subprocess.Popen(arguments, env=environment, start_new_session=True))
        while not models():
            if any(each.poll() is not None for each in processes):
                sys.exit("a process has ended: its message is above")
            time.sleep(0.2)
        for name in ("Nora", "Olaf"):
            messages = []
            for text in (f"My name is {name}, and I like boats. " * 8, "What is my name?"):
                messages.append({"role": "user", "content": text})
                reply = ask("chat/completions", {"model": models()[0], "messages": messages, "max_tokens": 16})
                messages.append(reply["choices"][0]["message"])
                usage = reply["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                print(f"{name}: {cached} of {usage['prompt_tokens']} prompt tokens were cached")
                time.sleep(0.2)  # the router is told of cached blocks ten times a second
        print(f"{url} serves {models()[0]}; Ctrl-C stops all")
        while not options.exit:
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    finally:
        for each in processes:
            each.terminate()
        for each in processes:
            each.wait(60)
