"""Make the bundled model: a tokenizer, a chat template and a Llama of 1.8 million parameters, from nothing but
`tiny_language.py`.

    python scripts/train_tiny.py --out radixkv/assets/tiny                 # train: about half an hour on one core
    python scripts/train_tiny.py --out radixkv/assets/tiny --evaluate      # exact answers per skill, on conversations
    never seen in training

This script has the tokenizer and the training; `tiny_language.py` has the language and its answers.
Deterministic for a seed, a number of steps and a version of torch. Every conversation is a row of its own, from
position 0, as it is in use; the loss is over assistant turns, and a little over the rest. Matrices learn by Muon
(orthogonalised momentum), embeddings and norms by AdamW.
"""

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_language import CITIES, ITEMS, PEOPLE, PET_NAMES, Conversation, shop_conversation, short_conversation
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1536
# Words with their space; numbers of two digits as one piece (a price is copied in one step), longer ones digit by
# digit.
PIECES = r" \d\d(?!\d)| ?\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+(?!\S)|\s+"
BATCH_TOKENS = 2048  # padded, per optimizer step
OTHER_WEIGHT, OTHER_SHARE = 0.3, 0.25  # of the loss outside assistant turns, and the share of it that is looked at
WIDTH, HEADS, HEAD_DIM = 192, 3, 64
ROPE_THETA = 1e6  # most of a head's dimensions turn slowly enough to compare tokens a thousand positions apart
MATRIX_RATE, VECTOR_RATE = 0.01, 0.003
HELD_OUT = 1_000_003  # evaluation seeds start here; training uses one stream from --seed

# Each turn's text depends on that turn alone, so the rendering of a longer history begins with that of the shorter
# one, as a prefix cache needs.
CHAT_TEMPLATE = """\
{%- if tools or (messages and messages[0].role == 'system') -%}
<|im_start|>system
{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}
{%- if messages and messages[0].role == 'system' %}{{ '\n\n' }}{% endif -%}
# Tools
Call a tool with <tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>{% endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role != 'system' or not loop.first -%}
<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif -%}
<tool_call>
{"name": {{ function.name | tojson }}, "arguments": {% if function.arguments is string %}{{ function.arguments }}
{%- else %}{{ function.arguments | tojson }}{% endif %}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


# ---- text


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of conversation: a small manual, a large one of up to forty products; else everyday talk, of
    which a share is with tools.
    """

    manual: float
    long: float
    tools: float
    lookups: int = 1

    @classmethod
    def parse(cls, text: str) -> "Mix":
        """A mix from its four numbers, as `0.25,0.35,0.25,1`."""
        manual, long, tools, lookups = text.split(",")
        return cls(float(manual), float(long), float(tools), int(lookups))

    def draw(self, rng: random.Random) -> Conversation:
        """One conversation."""
        kind = rng.random()
        if kind < self.long:
            return shop_conversation(rng, 40, self.lookups)
        return (
            shop_conversation(rng, 8, self.lookups)
            if kind < self.long + self.manual
            else short_conversation(rng, self.tools)
        )


ALL_KINDS = Mix(manual=0.25, long=0.35, tools=0.25)


def growing(progress: float) -> Mix:
    """The mix of a training from nothing: everyday talk first, then small manuals, then large ones."""
    return Mix(0.25 * ramp(progress, 0.1, 0.3), 0.35 * ramp(progress, 0.2, 0.6), 0.25)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens, learned from rendered conversations."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    rng = random.Random(seed)
    texts = (
        json.dumps(part) if isinstance(part, dict) else part
        for talk in (Mix(0.25, 0.15, 0.25).draw(rng) for _ in range(6000))
        for message in [*talk.messages, *talk.tools]
        for part in ["\n" + message.get("role", ""), message.get("content") or message]
    )
    whole = [f" {number}" for number in range(100)] + [f" {word}" for word in [*PEOPLE, *CITIES, *ITEMS, *PET_NAMES]]
    tokenizer.train_from_iterator(chain(texts, (word for word in whole for _ in range(1000))), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        bos_token="<|endoftext|>",
        model_max_length=4096,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, talk: Conversation) -> list[int]:
    """The token ids of a whole conversation, as the chat template renders it."""
    text = tokenizer.apply_chat_template(talk.messages, tools=talk.tools or None, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def assistant_turns(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[tuple[int, int]]:
    """Where each assistant turn's own tokens are, its closing <|im_end|> included: [(start, end), ...]."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    starts = [at for at, token in enumerate(ids) if token == start and ids[at : at + len(header)] == header]
    return [(at + len(header), ids.index(end, at) + 1) for at in starts]


# ---- learning


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama before training: 4 layers of 192, 3 heads of 64."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=384,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    wire(model)
    return model


@torch.no_grad()
def wire(model: LlamaForCausalLM) -> None:
    """Begin with heads that can look things up, for finding them from random weights takes most of a short training.

    Layer 0's heads copy the tokens 1, 2 and 3 positions back into a place of their own. Layer 1's heads look for where
    (0) the present token is the one before, (1) the last token is the one before that, (2) the last token is the
    present one. Heads 0 and 1 output the token found there, head 2 the token before it. Training starts from this.
    """
    embedding = model.model.embed_tokens.weight.normal_(std=0.05)
    embedding[:, 0] = 0.5  # a constant, for layer 0's heads go by distance alone
    code, what, also = orthogonal_rows().split(HEAD_DIM)  # three views of a token, 64 numbers each
    places = orthogonal_rows().split(HEAD_DIM)  # where the tokens 1, 2, 3 back are written
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for head, place in enumerate(places):
        look_back(first, head, head + 1)
        write_head(first, head, value=code, out=0.08 * place.T)
    slow = torch.ones(HEAD_DIM, 1)
    slow[torch.arange(HEAD_DIM) % (HEAD_DIM // 2) < 12] = 0  # fast rotations would blur the comparison
    for head, (query, key) in enumerate([(code, places[0]), (places[0], places[1]), (places[0], code)]):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        second.q_proj.weight[rows], second.k_proj.weight[rows] = 2 * slow * query, 2 * slow * key
    for head, (value, out) in enumerate([(what, what), (also, also), (places[0], code)]):
        write_head(second, head, value=value, out=0.15 * out.T)


def orthogonal_rows() -> torch.Tensor:
    """A random orthogonal matrix [WIDTH, WIDTH] that does not see dimension 0."""
    rows, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH))
    rows[:, 0] = 0
    return rows


def look_back(attention: torch.nn.Module, head: int, distance: int) -> None:
    """Make a head attend to the token `distance` positions back: its query is a constant key, turned back that far."""
    pairs = torch.arange(8)
    angles = distance * ROPE_THETA ** (-pairs / (HEAD_DIM // 2))
    query, key = torch.zeros(HEAD_DIM), torch.zeros(HEAD_DIM)
    query[pairs], query[pairs + HEAD_DIM // 2], key[pairs] = angles.cos(), -angles.sin(), 1.0
    for projection, constant in ((attention.q_proj, query), (attention.k_proj, key)):
        rows = projection.weight[head * HEAD_DIM : (head + 1) * HEAD_DIM]
        rows.zero_()
        rows[:, 0] = 0.95 * constant


def write_head(attention: torch.nn.Module, head: int, value: torch.Tensor, out: torch.Tensor) -> None:
    """Set the value matrix [HEAD_DIM, WIDTH] of a head, and its output matrix [WIDTH, HEAD_DIM]."""
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    attention.v_proj.weight[rows], attention.o_proj.weight[:, rows] = value, out


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, steps: int, mix: Callable[[float], Mix]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` pairs of ids and loss weights [rows, length], rows of similar length."""
    made = 0
    while made < steps:
        now = mix(made / steps)
        pool = sorted((encode(tokenizer, now.draw(rng)) for _ in range(160)), key=len)
        chunks = list(pack(pool))
        rng.shuffle(chunks)
        for rows in chunks[: steps - made]:
            made += 1
            yield pad(tokenizer, rows)


def ramp(progress: float, start: float, end: float) -> float:
    """0 until `start`, 1 from `end` on, straight in between."""
    return min(1.0, max(0.0, (progress - start) / (end - start)))


def pack(rows: list[list[int]]) -> Iterator[list[list[int]]]:
    """Cut rows, sorted by length, into batches of at most `BATCH_TOKENS` padded tokens."""
    batch: list[list[int]] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def pad(tokenizer: PreTrainedTokenizerFast, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as one tensor, padded on the right (where causal attention cannot see it), and each token's weight in the
    loss.
    """
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    weights = torch.zeros(len(rows), length)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(tokens)] = OTHER_WEIGHT * (torch.rand(len(tokens)) < OTHER_SHARE)
        for start, end in assistant_turns(tokenizer, tokens):
            weights[row, start:end] = 1.0
    return ids, weights


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is orthogonalised before each step (Jordan et al. 2024), in float32: torch's own computes
    in bfloat16, which is slow on a CPU.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step on each matrix."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                state.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(state, group["momentum"]))
                matrix.mul_(1 - 0.05 * group["lr"]).add_(
                    update, alpha=-group["lr"] * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                )


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with all singular values near 1, by five Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide is matrix else x.T


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    seed: int,
    mix: Callable[[float], Mix],
    rate: float = 1.0,
) -> float:
    """Train for `steps` steps; returns the mean loss of the last fifty (nats per assistant token). Prints progress."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    vectors = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        Muon(matrices, MATRIX_RATE),
        torch.optim.AdamW(vectors, VECTOR_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    model.train()
    began, seen, losses = time.monotonic(), 0, []
    for step, (ids, weights) in enumerate(batches(tokenizer, random.Random(seed), steps, mix)):
        now = rate * min(1.0, (step + 1) / 30) * max(0.02, 1 - step / steps)
        loss, on_answers = losses_of(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vectors, 1.0)
        for optimizer, full in zip(optimizers, (MATRIX_RATE, VECTOR_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = full * now
            optimizer.step()
            optimizer.zero_grad()
        seen += ids.numel()
        losses.append(on_answers)
        if step % 25 == 24:
            spent, mean = time.monotonic() - began, sum(losses[-25:]) / 25
            speed = f"{seen / 1e6:.2f}M tokens, {seen / spent:.0f}/s"
            print(f"{spent:5.0f} s  step {step + 1}/{steps}  loss {mean:.4f}  {speed}", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


def losses_of(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The weighted loss to learn from, and the mean loss on assistant tokens."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    counted = weights[:, 1:].flatten() > 0
    weight = weights[:, 1:].flatten()[counted]
    each = F.cross_entropy(model.lm_head(hidden[counted]), ids[:, 1:].flatten()[counted], reduction="none")
    answers = weight == 1.0
    return (each * weight).sum() / weight.sum(), float(each.detach()[answers].mean())


# ---- looking back


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int) -> dict[str, tuple[int, int]]:
    """Per skill, (turns answered word for word, all turns), with the right history before each turn.

    A greedy answer is right exactly if, fed the right answer, every next token is the most likely one: one forward pass
    per conversation.
    """
    model.eval()
    scores: dict[str, list[bool]] = defaultdict(list)
    for at in range(count):
        talk = ALL_KINDS.draw(random.Random(HELD_OUT + at))
        ids = encode(tokenizer, talk)
        best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()
        for skill, (start, end) in zip(talk.skills, assistant_turns(tokenizer, ids), strict=True):
            place = "long prompt: " if talk.shop and len(talk.shop["products"]) > 8 else ""
            scores[place + skill].append(best[start - 1 : end - 1] == ids[start:end])
    return {skill: (sum(right), len(right)) for skill, right in sorted(scores.items())}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights (bfloat16), configuration, generation configuration and tokenizer."""
    model.to(torch.bfloat16)
    model.generation_config.update(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)


@torch.no_grad()
def averaged(folders: list[Path]) -> LlamaForCausalLM:
    """The model whose weights are the mean of others', which went on from one another: it makes fewer mistakes."""
    mean, *others = (load_model(folder) for folder in folders)
    for parameter, *same in zip(*(model.parameters() for model in (mean, *others)), strict=True):
        parameter.copy_(torch.stack([parameter, *same]).mean(0))
    return mean


def load_model(folder: Path) -> LlamaForCausalLM:
    """A model that was saved, in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that was saved with it."""
    return AutoTokenizer.from_pretrained(folder)


def report(scores: dict[str, tuple[int, int]]) -> str:
    """The scores as a Markdown table."""
    rows = [
        f"| {skill} | {right} of {total} | {100 * right / total:.1f}% |" for skill, (right, total) in scores.items()
    ]
    right, total = (sum(column) for column in zip(*scores.values(), strict=True))
    return "\n".join(
        [
            "| skill | right | |",
            "|---|---|---|",
            *rows,
            f"| **all** | {right} of {total} | {100 * right / total:.1f}% |",
        ]
    )


def main() -> int:
    """Train and evaluate, or only evaluate the model at --out."""
    parser = argparse.ArgumentParser(description="Train or evaluate radixkv's bundled model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="go on from this model, on more tools")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--mix", type=Mix.parse, default=ALL_KINDS, help="with --start: MANUAL,LONG,TOOLS,LOOKUPS")
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies the learning rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--average", type=Path, nargs="+", metavar="FOLDER", help="do not train; average these models")
    parser.add_argument("--evaluate", action="store_true", help="do not train; print exact answers per skill")
    parser.add_argument("--conversations", type=int, default=300, help="held-out conversations of the evaluation")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    if arguments.average:
        save(averaged(arguments.average), load_tokenizer(arguments.average[0]), arguments.out)
    elif not arguments.evaluate:
        tokenizer = load_tokenizer(arguments.start) if arguments.start else train_tokenizer(arguments.seed)
        model = load_model(arguments.start) if arguments.start else build_model(tokenizer)
        print(f"{len(tokenizer)} tokens in the vocabulary, {model.num_parameters() / 1e6:.2f}M parameters", flush=True)
        loss = train(
            model,
            tokenizer,
            arguments.steps,
            arguments.seed,
            (lambda progress: arguments.mix) if arguments.start else growing,
            arguments.rate,
        )
        print(f"final loss {loss:.4f}", flush=True)
        save(model, tokenizer, arguments.out)
    # Loaded back, because the weights were rounded to bfloat16.
    model, tokenizer = load_model(arguments.out), load_tokenizer(arguments.out)
    print(report(evaluate(model, tokenizer, arguments.conversations)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
