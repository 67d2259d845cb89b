"""Weights, tokenizer, chat template and stop tokens of the GGUF file are those that transformers reads from it."""

from __future__ import annotations

import torch

from radixkv import Engine
from radixkv.cli.demo_script import MANUAL
from radixkv.models.attention_interface import own_attention
from radixkv.models.rounding import relative_error
from tests.real.conversations import HANDBOOK, QUESTIONS
from tests.real.reference import Reference

TEXTS = (
    *QUESTIONS,
    MANUAL,
    HANDBOOK,
    " leading",
    "trailing ",
    "a  b\t\tc\n\n\nd",
    "3.14159 1000000",
    "don't WE'LL I'm",
)
CONTROLS = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"


def test_weights_are_equal_bit_for_bit(engine: Engine, reference: Reference) -> None:
    """Those of the running engine, read back from the packed layers."""
    own, expected = engine.model.model, reference.model.state_dict()
    for name, weight in expected.items():
        layer, _, leaf = name.rpartition(".")
        got = getattr(own.get_submodule(layer), leaf)
        assert got.dtype == weight.dtype == torch.float32
        assert torch.equal(got, weight), name
    assert len(expected) == 273  # 272 tensors of the file, one of which is embedding and head


def test_rotary_frequencies_and_sizes_are_equal(engine: Engine, reference: Reference, model_code: str) -> None:
    own, expected = engine.model.model, reference.model
    frequencies = expected.get_buffer("model.rotary_emb.inv_freq")
    name = {"auto": "rotations.0.frequencies", "transformers": "rotary_emb.inv_freq"}[model_code]
    torch.testing.assert_close(own.get_buffer(f"model.{name}"), frequencies, atol=0, rtol=1e-6)
    assert engine.model.max_length == expected.config.max_position_embeddings == 8192
    assert engine.model.vocab_size == expected.config.vocab_size
    assert torch.equal(*(torch.tensor(model.config.rms_norm_eps) for model in (own, expected)))


@torch.inference_mode()
def test_logits_are_those_of_transformers(engine: Engine, reference: Reference, model_code: str) -> None:
    assert type(engine.model.model).__name__ == {"auto": "NativeModel", "transformers": "LlamaForCausalLM"}[model_code]
    ids = torch.tensor([reference.tokenizer.encode(HANDBOOK)[:500]])
    with own_attention(engine.model.model):
        found, expected = (model(ids, use_cache=False).logits for model in (engine.model.model, reference.model))
    assert relative_error(found, expected) <= 1e-5


def test_texts_are_encoded_alike(engine: Engine, reference: Reference) -> None:
    own = engine.model.tokenizer
    for text in (*TEXTS, CONTROLS):
        ids = reference.tokenizer.encode(text, add_special_tokens=False)
        assert own.encode(text, add_special_tokens=False) == ids, text
        assert own.decode(ids) == reference.tokenizer.decode(ids) == text


def test_the_chat_template_comes_from_the_file(engine: Engine, reference: Reference) -> None:
    messages = [{"role": "system", "content": HANDBOOK}]
    for question in QUESTIONS[:3]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]
    for chat in (messages[:2], messages[1:4], messages):
        for prompt in (False, True):
            own, expected = (
                tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
                for tokenizer in (engine.model.tokenizer, reference.tokenizer)
            )
            assert own == expected


def test_a_reply_ends_at_the_end_of_a_message(engine: Engine) -> None:
    named = {engine.model.tokenizer.convert_ids_to_tokens(token) for token in engine.model.stop_token_ids}
    assert "<|im_end|>" in named
    assert named <= {"<|im_end|>", "<|endoftext|>"}
