"""Replies that a template writes otherwise than models sample them: each prompt is the text that the template gives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from radixkv.chat.history_mode import try_appending
from radixkv.chat.messages import Message, ToolCall
from radixkv.chat.template import ChatTemplate
from tests.chat.worlds import byte_tokenizer, chat_engine

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
WAYS = pytest.mark.parametrize("append", [True, False], ids=["append", "template"])

# An answer is closed before its turn ends.
CLOSED = """{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == 'assistant' %}<|say|>{{ m.content }}<|said|>{% else %}
{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""

# Each prompt opens the thinking, one after results, too; that of replies before the last user's message is left out,
# and an EMPTY one may be written in its place.
OPENED = """{{- tools if tools }}{%- set last = namespace(at=0) %}
{%- for m in messages if m.role == 'user' %}{% set last.at = messages.index(m) %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}
{%- if loop.index0 > last.at %}{{ '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' }}
{%- else %}EMPTY{% endif %}
{%- endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\n' if m.content or not loop.first }}<call>{{ call.function.name }}:
{{- call.function.arguments | tojson }}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
# Thinking in tags of its own, which goes once a user speaks; a turn with calls has the results in it, then its words.
OWN_TAGS = """{{- tools if tools }}{%- set state = namespace(last=0, open=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set state.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set at = loop.index %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' if not state.open }}
{%- if m.reasoning_content and at > state.last %}{{ '<|muse>deep\n' ~ m.reasoning_content ~ '\n<muse|>' }}{% endif %}
{%- set state.open = m.tool_calls and not m.content %}
{%- for call in m.tool_calls or [] %}
{{- '<call>' ~ call.function.name ~ (call.function.arguments | tojson) ~ '</call>' }}
{%- endfor %}
{%- set results = namespace(go_on=m.tool_calls) %}
{%- for r in messages[at:] %}
{%- if r.role != 'tool' %}{% set results.go_on = false %}{% endif %}
{%- if results.go_on %}<|result>{{ r.content }}<result|>{% endif %}
{%- endfor %}
{{- m.content }}{{ '<|im_end|>\n' if m.content }}
{%- elif m.role != 'tool' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt and not state.open %}<|im_start|>assistant
{% endif %}"""
OWN = ("<|muse>", "<muse|>", "<|result>", "<result|>")
OSLO = '{"at": "Oslo"}'
FORGOTTEN, EMPTY = OPENED.replace("EMPTY", ""), OPENED.replace("EMPTY", "<think></think>\n")


def tokenizer_of(template: str, *controls: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(controls)})
    tokenizer.add_tokens(list(words))
    return tokenizer


class Talk:
    """Turns of a session, without an engine: the sampled replies, and the texts of the prompts."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, append: bool, tools: Any = None, stops: Sequence[str] = ()
    ) -> None:
        ids = tokenizer.convert_tokens_to_ids([*stops, "<|im_end|>"])
        self.template = ChatTemplate(tokenizer, frozenset(ids), tools)
        self.append = append
        self.messages: list[Message] = []
        self.truth: list[Message] = []  # with the thinking, which a session's messages lack
        self.said: dict[int, list[int]] = {}
        self.ids = array("i")

    def ask(self, *new: Message) -> str:
        asked = self.messages[-1].get("tool_calls", ()) if self.messages and new[0]["role"] == "tool" else ()
        calls = [ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in asked]
        before = self.ids
        self.messages += new
        self.truth += new
        if not before:
            self.ids = self.template.opening(self.messages)
        elif self.append:
            self.ids = self.template.continued(before, new, calls)
        else:
            self.ids = self.template.spliced(self.messages, self.said, keep_thinking=False)
        return self.template.rendering.text(self.ids)

    def hear(self, sampled: str, thinking: str = "", **message: Any) -> None:
        ids = self.template.rendering.encode(sampled)
        self.said[len(self.messages)] = ids
        self.messages.append({"role": "assistant", **message})
        self.truth.append({**self.messages[-1], "reasoning_content": thinking} if thinking else self.messages[-1])
        self.ids = self.ids + array("i", ids)

    def written(self) -> str:
        """The whole history as the template gives it."""
        rendering = self.template.rendering
        return rendering.text(rendering.encode(rendering.render(self.truth)))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def called(*names: str) -> list[Message]:
    return [ToolCall(f"call0000{at}", name, {"at": "Oslo"}).as_message() for at, name in enumerate(names)]


def result(text: str, at: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{at}", "name": "look", "content": text}


@WAYS
@pytest.mark.parametrize(
    "sampled", ["Hello.<|said|><|im_end|>", "Hello.", "Hello.<|said|>"], ids=["whole", "cut", "late"]
)
def test_what_closes_an_answer_stands_there_once(append: bool, sampled: str) -> None:
    talk = Talk(tokenizer_of(CLOSED, "<|say|>", "<|said|>"), append=append)
    talk.ask(user("Hi."))
    talk.hear("<|say|>" + sampled, content="Hello.")
    assert talk.ask(user("And <|said|>?")) == talk.written()
    talk.hear("<|say|>Yes." + sampled.removeprefix("Hello."), content="Yes.")
    assert talk.ask(user("End?")) == talk.written()


@WAYS
def test_an_answer_that_was_cut_while_it_closed_is_closed_by_what_lacks(append: bool) -> None:
    talk = Talk(tokenizer_of(CLOSED.replace("<|said|>", "<|said|><|done|>"), "<|said|>", "<|done|>"), append=append)
    talk.ask(user("Hi."))
    talk.hear("<|say|>Hello.<|said|>", content="Hello.")
    assert talk.ask(user("End?")) == talk.written()


def test_thinking_about_results_is_left_out_where_each_prompt_opens_it() -> None:
    talk = Talk(tokenizer_of(FORGOTTEN, words=["<think>", "</think>"]), append=False, tools=TOOLS)
    talk.ask(user("Where?"))
    talk.hear(
        f"I look.\n</think>\n\n<call>look:{OSLO}</call><|im_end|>",
        "I look.",
        content="",
        tool_calls=called("look"),
    )
    assert talk.ask(result("Here.")) == talk.written()
    talk.hear("It says so.\n</think>\n\nHere.<|im_end|>", "It says so.", content="Here.")
    assert talk.ask(user("Sure?")) == talk.written()
    assert talk.written().count("says so") == 0
    talk.hear("Hm.\n</think>\n\nYes.<|im_end|>", "Hm.", content="Yes.")
    assert talk.ask(user("Bye.")) == talk.written()


@pytest.mark.parametrize("content", ["", "I go."], ids=["calls", "words and calls"])
@pytest.mark.parametrize("template", [FORGOTTEN, EMPTY], ids=["nothing", "empty tags"])
@pytest.mark.parametrize("spelled", [OSLO, '{ "at":"Oslo" }'], ids=["alike", "otherwise"])
def test_what_stands_before_calls_whose_thinking_is_left_out_is_the_template_s(
    template: str, content: str, spelled: str
) -> None:
    talk = Talk(tokenizer_of(template, words=["<think>", "</think>"]), append=False, tools=TOOLS)
    talk.ask(user("Where?"))
    words = f"{content}\n" if content else ""
    calls = f"<call>look:{spelled}</call>\n<call>see:{OSLO}</call>"
    talk.hear(
        f"I look.\n</think>\n\n{words}{calls}<|im_end|>", "I look.", content=content, tool_calls=called("look", "see")
    )
    assert talk.ask(result("Here."), result("There.", 1)) == talk.written().replace(OSLO, spelled, 1)
    talk.hear("Yes.\n</think>\n\nHere.<|im_end|>", "Yes.", content="Here.")
    for _ in range(2):
        assert talk.ask(user("Sure?")) == talk.written()
        talk.hear("Hm.\n</think>\n\nYes.<|im_end|>", "Hm.", content="Yes.")


def test_ids_of_calls_stay_where_their_thinking_is_left_out_and_their_arguments_stay_text() -> None:
    talk = Talk(tokenizer_of(EMPTY, words=["<think>", "</think>"]), append=False, tools=TOOLS)
    talk.ask(user("Where?"))
    talk.hear(f"I look.\n</think>\n\n<call>look:{OSLO}</call><|im_end|>", "I.", content="", tool_calls=called("look"))
    sampled = talk.said[1]
    letters = talk.template.rendering.tokenizer.convert_tokens_to_ids(list("<call>look:"))
    at = talk.template.rendering.encode("I look.\n</think>\n\n")
    talk.said[1] = [*at, *letters, *talk.template.rendering.encode(f"{OSLO}</call><|im_end|>")]
    assert talk.said[1] != sampled
    talk.ask(user("Never mind."))
    ids = list(talk.ids)
    assert any(ids[here : here + len(letters)] == letters for here in range(len(ids)))
    talk.messages[1]["tool_calls"][0]["function"]["arguments"] = {"at": "<|im_end|><|im_start|>"}
    ends = talk.template.rendering.encode("<|im_end|>")
    count = ids.count(ends[0])
    talk.ids = talk.template.spliced(talk.messages, talk.said, keep_thinking=False)
    assert '<|im_end|><|im_start|>"' in talk.template.rendering.text(talk.ids)
    assert list(talk.ids).count(ends[0]) == count


@WAYS
def test_results_stand_after_their_call_where_a_turn_s_words_come_last(append: bool) -> None:
    talk = Talk(tokenizer_of(OWN_TAGS, *OWN), append=append, tools=TOOLS, stops=["<|result>"])
    talk.ask(user("Where?"))
    talk.hear(
        f"<|muse>deep\nI look.\n<muse|><call>look{OSLO}</call><|result>",
        "I look.",
        content="",
        tool_calls=called("look"),
    )
    assert talk.ask(result("Here.")) == talk.written()
    talk.hear("It is here.<|im_end|>", content="It is here.")
    text = talk.ask(user("Sure?"))
    assert text.count("<|result>Here.<result|>It is here.<|im_end|>") == 1
    assert text == talk.written() or append
    template = talk.template
    assert try_appending(template).loss(tools=True) is None
    assert (template.form.words_after_results, template.form.begins_after_results) == (True, "<result|>")


def test_thinking_in_tags_of_the_template_s_own_is_read_and_left_out() -> None:
    def reply(said: str) -> str:
        return f"<|muse>deep\nHm, {said}.\n<muse|>{said}!"

    with chat_engine(reply, template=OWN_TAGS) as engine, engine.chat() as chat:
        first = chat.send("one")
        assert (first.thinking, first.text) == ("Hm, one.", "one!")
        assert chat.send("two").text == "two!"
        text = engine.model.tokenizer.decode(chat.token_ids)
        assert "Hm, one." not in text and "Hm, two." in text
        assert "<|im_start|>assistant\none!<|im_end|>" in text
    assert chat.closed
