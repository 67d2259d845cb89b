"""The load and the figures of benchmarks/serving.py: a benchmark that asks the wrong thing is worse than none."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from peers import gguf_llama  # in the folder of the benchmarks, not installed
from serving_parts.clients import Record, closed_loop, open_loop
from serving_parts.figures import agreement, figures, median
from serving_parts.servers import Counted
from serving_parts.workloads import SHAPES, Session, Shape, build

SMALL = Shape(opening=5, sessions=4, turns=3, new=(1, 4), reply=(2, 3), pause_s=0.001, branch_every=2)


class Echo:
    """Replies with numbers that depend on the whole prompt; counts how many it serves at once."""

    name = "echo"

    def __init__(self, cut: int = 0) -> None:
        self.lock, self.now, self.most, self.cut = threading.Lock(), 0, 0, cut

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        for number in range(tokens - self.cut):
            yield [hash((*prompt, number)) % 1000]
        with self.lock:
            self.now -= 1

    def counted(self) -> Counted:
        return Counted(0, 0, None, 0)

    def close(self) -> None: ...


def check_histories(records: list[Record], sessions: list[Session]) -> None:
    """Each request was sent once, after the whole history of its session and of the parent of that session."""
    found = {(record.session, record.turn): record for record in records}
    assert len(found) == len(records) == sum(session.requests for session in sessions)

    def follow(session: Session, history: list[int]) -> None:
        for number, turn in enumerate(session.turns):
            record = found[session.name, number]
            history += turn.new
            assert list(record.prompt) == history
            assert len(record.reply) == len(record.arrivals) == turn.reply
            history += record.reply
        for branch in session.branches:
            follow(branch, list(history))

    for session in sessions:
        follow(session, [])


@pytest.mark.parametrize("shape", [SMALL, *SHAPES.values()])
def test_a_workload_is_the_same_each_time_and_shares_its_opening(shape: Shape) -> None:
    sessions = build(shape, vocab=100)
    assert sessions == build(shape, vocab=100)
    assert sessions != build(shape, vocab=100, seed=1)
    assert len({session.turns[0].new[: shape.opening] for session in sessions}) == 1
    assert len({session.turns[0].new for session in sessions}) == shape.sessions
    turns = [turn for session in sessions for each in (session, *session.branches) for turn in each.turns]
    assert all(shape.reply[0] <= turn.reply <= shape.reply[1] for turn in turns)
    assert all(3 <= token < 100 for turn in turns for token in turn.new)
    branching = 0 if not shape.branch_every else -(-shape.sessions // shape.branch_every)
    assert len(turns) == shape.sessions * shape.turns + branching * shape.branches * shape.branch_turns
    assert len(turns) == sum(session.requests for session in sessions)


def test_longest_is_the_longest_history() -> None:
    sessions = build(SMALL, vocab=100)
    records = closed_loop(Echo(), sessions, clients=1)
    for session in sessions:
        own = [r for r in records if r.session.split(".")[0] == session.name]
        assert session.longest() == max(len(r.prompt) + len(r.reply) for r in own)


@pytest.mark.parametrize("clients", [1, 3])
def test_clients_say_what_the_sessions_say(clients: int) -> None:
    sessions, server = build(SMALL, vocab=100), Echo()
    check_histories(closed_loop(server, sessions, clients), sessions)
    assert server.most <= clients


class Meeting(Echo):
    """Sends no answer before `parties` requests have arrived."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.all_here = threading.Barrier(parties, timeout=30)
        self.met = threading.Event()

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        if not self.met.is_set():
            self.all_here.wait()
            self.met.set()
        yield from super().stream(prompt, tokens)


def test_arrivals_wait_for_nobody() -> None:
    sessions = build(SMALL, vocab=100)
    check_histories(open_loop(Meeting(len(sessions)), sessions, rate=1000), sessions)


def test_a_reply_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="were asked for"):
        closed_loop(Echo(cut=1), build(SMALL, vocab=100), clients=2)


def record(session: str, turn: int, prompt: tuple[int, ...], reply: tuple[int, ...], *times: float) -> Record:
    return Record(session, turn, prompt, reply, times[0], times[1:])


def test_figures_of_two_requests() -> None:
    records = [
        record("0", 0, (1, 2), (5, 6, 7), 10.0, 10.5, 10.6, 10.8),
        record("1", 0, (1, 2, 3), (5, 6), 10.2, 11.2, 12.0),
    ]
    found = figures(records, Counted(4, 9, None, 3_000_000))
    assert (found.requests, found.seconds, found.requests_per_s, found.output_tokens_per_s) == (2, 2.0, 1.0, 2.5)
    assert (found.ttft_p50_ms, found.gap_p50_ms, found.gap_max_ms) == pytest.approx((750, 200, 800))
    assert (found.prompt_tokens, found.hit_tokens, found.kv_mb, found.held_mb) == (5, 4, 3.0, None)
    later = figures([record("0", 0, (1,), (5, 6), 0.0, 1.0, 5.0)], Counted(1, 1, 2, 1, 1))
    both = median([found, later, later])
    assert (both.seconds, both.hit_tokens, both.preemptions) == (5.0, 1, None)


def judge(ids: torch.Tensor, logits_to_keep: int) -> Any:
    """Logits 0, 0.1, 0.2 and so on, for any history."""
    return SimpleNamespace(logits=torch.arange(100).expand(1, logits_to_keep, 100) / 10)


def test_replies_that_part_are_judged_where_they_part_and_no_further() -> None:
    ours = [
        record("0", 0, (1,), (5, 6, 7), 0, 1),
        record("0", 1, (1, 5, 6, 7, 2), (8,), 0, 1),
        record("0.0", 0, (1, 5, 6, 7, 2, 8, 3), (9,), 0, 1),
        record("1", 0, (2,), (5,), 0, 1),
    ]
    assert agreement(judge, ours, ours[::-1]) == agreement(judge, ours, ours)
    assert (agreement(judge, ours, ours).alike, agreement(judge, ours, ours).widest) == (3, 0.0)
    parted = [
        record("0", 0, (1,), (5, 8, 1), 0, 1),
        record("0", 1, (1, 5, 8, 1, 2), (80,), 0, 1),  # another question: not compared
        record("0.0", 0, (1, 5, 8, 1, 2, 80, 3), (90,), 0, 1),
        ours[3],
    ]
    found = agreement(judge, ours, parted[::-1])
    assert (found.sessions, found.alike) == (3, 1)
    assert found.widest == pytest.approx(0.2)


# ---- GGUF


def small_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def read_gguf(data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Fields and tensors of a file, read as the format's description says."""
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def text() -> str:
        nonlocal at
        size = take("Q")
        at += size
        return data[at - size : at].decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = take("IQ")
            return [value(inner) for _ in range(count)]
        return take({4: "I", 5: "i", 6: "f"}[kind])

    assert data[:4] == b"GGUF"
    at = 4
    version, tensors, fields = take("IQQ")
    assert version == 3
    found = {text(): value(take("I")) for _ in range(fields)}
    infos = []
    for _ in range(tensors):
        name, dims = text(), take("I")
        shape = struct.unpack_from(f"<{dims}Q", data, at)
        at += 8 * dims
        infos.append((name, shape[::-1], *take("IQ")))
    begin = -(-at // 32) * 32
    weights = {}
    for name, shape, kind, offset in infos:
        assert (kind, offset % 32) == (0, 0)
        numbers = np.frombuffer(data, np.float32, int(np.prod(shape)), begin + offset)
        weights[name] = torch.from_numpy(numbers.copy()).reshape(shape)
    return found, weights


def test_a_gguf_file_holds_the_model(tmp_path: Path) -> None:
    model = small_llama()
    gguf_llama.write(model, tmp_path / "small.gguf")
    fields, weights = read_gguf((tmp_path / "small.gguf").read_bytes())
    assert (fields["general.architecture"], fields["llama.block_count"]) == ("llama", 2)
    assert (fields["llama.attention.head_count_kv"], fields["llama.rope.dimension_count"]) == (2, 8)
    assert len(set(fields["tokenizer.ggml.tokens"])) == 40
    assert sum(weight.numel() for weight in weights.values()) == sum(p.numel() for p in model.parameters())
    assert torch.equal(weights["output.weight"], model.lm_head.weight)
    assert torch.equal(weights["blk.1.ffn_down.weight"], model.model.layers[1].mlp.down_proj.weight)


def test_rows_turned_in_pairs_give_the_scores_of_rows_turned_in_halves(tmp_path: Path) -> None:
    model = small_llama()
    gguf_llama.write(model, tmp_path / "small.gguf")
    _, weights = read_gguf((tmp_path / "small.gguf").read_bytes())
    attention = model.model.layers[0].self_attn
    hidden, dim = torch.randn(6, 32), 8
    angles = torch.arange(6)[:, None] * 10_000 ** (-torch.arange(0, dim, 2) / dim)

    def halves(x: torch.Tensor) -> torch.Tensor:
        a, b = x.view(6, -1, 2, dim // 2).unbind(2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def pairs(x: torch.Tensor) -> torch.Tensor:
        a, b = x.view(6, -1, dim // 2, 2).unbind(3)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(2)

    theirs = pairs(hidden @ weights["blk.0.attn_q.weight"].T), pairs(hidden @ weights["blk.0.attn_k.weight"].T)
    ours = halves(attention.q_proj(hidden)), halves(attention.k_proj(hidden))
    for query, key in ((0, 0), (3, 1)):
        found = theirs[0][:, query] @ theirs[1][:, key].T
        torch.testing.assert_close(found, ours[0][:, query] @ ours[1][:, key].T)
