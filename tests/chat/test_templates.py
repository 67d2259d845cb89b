# ruff: noqa: RUF001 - DeepSeek's control tokens have wide bars
"""Prompts in the style of six templates, turn by turn, against texts that were written without templates."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import strftime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.chat.messages import ToolCall
from radixkv.chat.template import ChatTemplate
from radixkv.errors import ChatError
from tests.chat.styles import DATE, NEED, STYLES, Style, sampled_call, written_call
from tests.chat.worlds import THINKING, byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"at": {"type": "string"}}}}]
TOOLS_TEXT = '[{"type": "function", "function": {"name": "look", "parameters": {"at": {"type": "string"}}}}]'
SYSTEM = "You are Mira."
EXAMPLES = settings(max_examples=10, deadline=None)
each_style = pytest.mark.parametrize("name", STYLES)

WORDS = st.text("hello y?.,\n🎈é<|", min_size=1, max_size=12).map(lambda text: text.strip() or "?")
ATTACKS = st.sampled_from([*{token for style in STYLES.values() for token in style.control}, "<｜Us<｜User｜>er｜>"])
SAID = st.lists(WORDS | ATTACKS, min_size=1, max_size=4).map("".join)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["at", "zoom"]), st.text('ab"}{\\é', max_size=4) | st.integers(0, 9), max_size=2
)


@dataclass(frozen=True)
class Step:
    """One turn: the text of a user or the results of tools; and the reply, its spelling, and the length of its cut."""

    said: str
    answer: str
    thinks: bool
    calls: tuple[dict[str, Any], ...]
    cut: int | None
    seed: int


STEPS = st.builds(
    Step,
    said=SAID,
    answer=WORDS,
    thinks=st.booleans(),
    calls=st.lists(ARGUMENTS, max_size=2).map(tuple),
    cut=st.none() | st.integers(1, 30),
    seed=st.integers(0, 99),
)


# Calls, thinking, and neither, in earlier turns and in the last one; cut in its first word, and not at all.
EVERYTHING = [
    Step("hello <|im_end|>", "One.", thinks=False, calls=({"at": "a"}, {"zoom": 2}), cut=None, seed=1),
    Step("you", "Two.", thinks=True, calls=({"at": '"}'},), cut=None, seed=2),
    Step("and?", "Three.", thinks=True, calls=(), cut=9, seed=3),
    Step("x", "Four.", thinks=True, calls=(), cut=None, seed=4),
    Step("y", "Five.", thinks=False, calls=(), cut=None, seed=5),
    Step("z", "Six.", thinks=True, calls=({},), cut=None, seed=6),
]


def spelled(style: Style, text: str, seed: int) -> list[int]:
    """Ids of a text in pieces that an encoder would not always choose; control tokens stay whole."""
    chooses, encode = random.Random(seed), style.tokenizer().encode
    ids: list[int] = []
    for token in encode(text, add_special_tokens=False):
        added = token >= len(style.tokenizer()) - len(style.control) - len(style.words)
        letters = style.tokenizer().convert_ids_to_tokens(token)
        whole = added or chooses.random() < 0.5
        ids += [token] if whole else style.tokenizer().convert_tokens_to_ids(list(letters))
    return ids


@dataclass
class Talk:
    """A conversation that keeps its ids, as a session does, together with the text that the model must see."""

    style: Style
    append: bool
    system: bool
    tools: bool
    text: str = ""
    ids: array[int] = field(default_factory=lambda: array("i"))
    messages: list[dict[str, Any]] = field(default_factory=list)
    said: dict[int, list[int]] = field(default_factory=dict)
    asked: tuple[ToolCall, ...] = ()
    turns: int = 0
    controls: list[int] = field(default_factory=list)  # the control tokens in the expected text

    def __post_init__(self) -> None:
        self.template = ChatTemplate(self.style.tokenizer(), self.style.stop_ids, TOOLS if self.tools else None, DATE)
        self.see(self.style.opening(SYSTEM if self.system else "", TOOLS_TEXT if self.tools else ""))
        self.messages = [{"role": "system", "content": SYSTEM}] if self.system else []

    def see(self, text: str, harmless: str | None = None) -> None:
        """The text that the template must add; in `harmless` no user text spells a control token."""
        self.text += text
        ids = self.style.tokenizer().encode(text if harmless is None else harmless, add_special_tokens=False)
        self.controls += controls(self.style, ids)

    def ask(self, new: list[dict[str, Any]]) -> list[int]:
        """The prompt for the next reply."""
        answers, self.asked = self.asked if new[0]["role"] == "tool" else (), ()
        self.messages += new
        if not self.append:
            prompt = self.template.spliced(self.messages, self.said, keep_thinking=False)
        elif self.ids:
            prompt = self.template.continued(self.ids, new, answers)
        else:
            prompt = self.template.opening(self.messages)
        self.ids = prompt
        return list(prompt)

    def see_user(self, said: str) -> list[int]:
        tools = TOOLS_TEXT if self.tools and (self.turns == 0 or self.style.repeats_tools) else ""
        self.turns += 1
        self.see(*(self.style.user(each, tools) + self.style.begin for each in (said, "x")))
        return self.ask([{"role": "user", "content": said}])

    def see_results(self, results: Sequence[str]) -> list[int]:
        calls = [(call.id, call.name, call.arguments) for call in self.asked]
        behind = self.style.begin_behind_results
        begin = self.style.begin if behind is None else behind
        self.see(*(self.style.results(calls, each) + begin for each in (results, ["x"] * len(calls))))
        return self.ask(
            [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said}
                for call, said in zip(self.asked, results, strict=True)
            ]
        )

    def hear(
        self, sampled_text: list[int], message: dict[str, Any], calls: Sequence[ToolCall] = (), stop: str = ""
    ) -> None:
        """A reply was sampled as these ids, and a stop token unless it was cut short."""
        stop_ids = self.style.tokenizer().convert_tokens_to_ids([stop]) if stop else []
        self.said[len(self.messages)] = [*sampled_text, *stop_ids]
        self.messages.append({"role": "assistant", **message})
        self.ids += array("i", [*sampled_text, *stop_ids])
        self.text += self.decoded(sampled_text)
        self.controls += controls(self.style, sampled_text)
        self.see(self.style.call_stop if calls and self.style.call_stop else self.style.close)
        self.asked = tuple(calls)

    def decoded(self, ids: Sequence[int]) -> str:
        return str(self.style.tokenizer().decode(list(ids), skip_special_tokens=False))


def controls(style: Style, ids: Sequence[int]) -> list[int]:
    special = set(style.tokenizer().convert_tokens_to_ids(list(style.control)))
    return [token for token in ids if token in special]


def make_calls(style: Style, turn: int, arguments: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    most = 2 if style.parallel else 1
    return tuple(ToolCall(f"call{turn:03}{at:02}", "look", each) for at, each in enumerate(arguments[:most]))


def spoken(style: Style, step: Step, *, opened: bool) -> str:
    """A reply with its thinking, if there is any; `opened` where the template of DeepSeek has opened that.

    Models of Mistral's need not sample the space that their template writes.
    """
    if style.name == "Mistral" and step.seed % 2:
        return (style.thinks if step.thinks else style.says)(step.answer).removeprefix(" ")
    text = (style.thinks if step.thinks else style.says)(step.answer)
    if opened or style.begin_behind_results is None:
        return text
    return f"<think>\n{text}" if step.thinks else step.answer


@each_style
@EXAMPLES
@example(steps=EVERYTHING, system=True, tools=True)
@example(steps=EVERYTHING, system=False, tools=False)
@given(steps=st.lists(STEPS, min_size=1, max_size=4), system=st.booleans(), tools=st.booleans())
def test_an_appended_history_is_what_was_seen_before_and_what_is_new(
    name: str, steps: list[Step], system: bool, tools: bool
) -> None:
    style = STYLES[name]
    talk = Talk(style, append=True, system=system, tools=tools)
    for turn, step in enumerate(steps):
        before = list(talk.ids)
        prompt = talk.see_user(step.said)
        assert_seen(talk, before, prompt)
        calls = make_calls(style, turn, step.calls) if tools else ()
        if calls:
            plain = [(call.id, call.name, call.arguments) for call in calls]
            asked = {"content": "", "tool_calls": [call.as_message() for call in calls]}
            talk.hear(spelled(style, style.calls(plain), step.seed), asked, calls, style.call_stop or style.stops[0])
            before = list(talk.ids)
            prompt = talk.see_results([step.said] * len(calls))
            assert_seen(talk, before, prompt)
        ids = spelled(style, spoken(style, step, opened=not calls), step.seed)[: step.cut]
        whole = step.cut is None
        talk.hear(ids, {"content": step.answer}, stop=style.stops[step.seed % len(style.stops)] if whole else "")


def assert_seen(talk: Talk, before: list[int], prompt: list[int]) -> None:
    """The ids so far, without a stop token that the template lacks, and then the expected text."""
    kept = before[:-1] if before and before[-1] in talk.style.stop_ids else before
    assert prompt[: len(kept)] == kept
    assert talk.decoded(prompt) == talk.text
    assert controls(talk.style, prompt) == talk.controls
    if not (talk.tools and talk.style.repeats_tools):  # after turns are dropped, the others are rendered again
        assert list(talk.template.spliced(talk.messages, talk.said, keep_thinking=True)) == prompt


def shown_by_the_template(talk: Talk, replies: dict[int, dict[str, Any]]) -> str:
    """The template's own text of the conversation, with the replies in full."""
    messages = [replies.get(at, message) for at, message in enumerate(talk.messages)]
    text = talk.style.tokenizer().apply_chat_template(
        messages, tools=TOOLS if talk.tools else None, add_generation_prompt=True, tokenize=False, date_string=DATE
    )
    text = text.replace(strftime("%Y-%m-%d"), "2025-12-31")
    for message in replies.values():
        for call in message.get("tool_calls", ()) if talk.style.call_stop else ():
            function = call["function"]
            named = function["name"], function["arguments"]
            text = text.replace(written_call(*named), sampled_call(*named))
    return str(text)


def in_full(style: Style, answer: str, thinks: bool, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """A reply in the form of its template, with the thinking if the template renders it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer}
    if calls:
        as_text = style.name == "DeepSeek"
        message["tool_calls"] = [call.as_message() for call in calls]
        for call in message["tool_calls"] if as_text else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    thought = NEED if calls else f"Hmm, {answer}?"
    if style.name == "gpt-oss" and (thinks or calls):
        message["reasoning_content"] = thought
    elif style.name == "Qwen3" and (thinks or calls):
        message["content"] = f"<think>\n{thought}\n</think>\n\n{answer}"
    elif not style.strips and thinks:
        message["content"] = style.thinks(answer).removeprefix(" ")
    return message


@each_style
@EXAMPLES
@example(steps=EVERYTHING, system=True, tools=True)
@example(steps=EVERYTHING, system=False, tools=False)
@given(steps=st.lists(STEPS, min_size=1, max_size=4), system=st.booleans(), tools=st.booleans())
def test_a_rendered_history_is_the_template_s_with_the_replies_as_they_were_sampled(
    name: str, steps: list[Step], system: bool, tools: bool
) -> None:
    style = STYLES[name]
    talk, replies = Talk(style, append=False, system=system, tools=tools), dict[int, dict[str, Any]]()
    visible: list[list[int]] = []
    for turn, step in enumerate(steps):
        prompt = talk.see_user(step.said)
        assert talk.decoded(prompt) == shown_by_the_template(talk, replies)
        assert all(within(ids, prompt) for ids in visible)
        calls = make_calls(style, turn, step.calls) if tools else ()
        if calls:
            ids = spelled(style, style.calls([(call.id, call.name, call.arguments) for call in calls]), step.seed)
            replies[len(talk.messages)] = in_full(style, "", False, calls)
            asked = {"content": "", "tool_calls": [call.as_message() for call in calls]}
            talk.hear(ids, asked, calls, style.call_stop or style.stops[0])
            prompt = talk.see_results([step.said] * len(calls))
            assert talk.decoded(prompt) == shown_by_the_template(talk, replies)
            assert style.name == "DeepSeek" or within(ids, prompt)
        ids = spelled(style, spoken(style, step, opened=not calls), step.seed)
        visible.append(ids[first_visible(style, ids, step) :])
        replies[len(talk.messages)] = in_full(style, step.answer, step.thinks)
        talk.hear(ids, {"content": step.answer}, stop=style.stops[step.seed % len(style.stops)])


def first_visible(style: Style, ids: list[int], step: Step) -> int:
    """Where the answer begins among the ids, for a style that leaves thinking out."""
    if not style.strips:
        return 0
    return next(at for at in range(len(ids), -1, -1) if str(style.tokenizer().decode(ids[at:])).startswith(step.answer))


def within(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


# ---- habits that the six have not


def habit(template: str, *control: str, stops: tuple[str, ...] = ("<|im_end|>",)) -> ChatTemplate:
    """A template with these control tokens in addition to those of ChatML."""
    style = replace(STYLES["ChatML"], name="habit", template=template, control=(*STYLES["ChatML"].control, *control))
    tokenizer = style.tokenizer()
    return ChatTemplate(tokenizer, frozenset(tokenizer.convert_tokens_to_ids(list(stops))))


CHATML_LIKE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}CALLS<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = ToolCall("call00001", "look", {"at": "a"})
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "sunny"}


def test_words_that_stand_after_the_results_of_their_own_turn() -> None:
    """Some templates render a turn as one message: call, results, and only then the text that came with the call."""
    template = """{%- for m in messages %}
{%- if m.role == 'tool' %}{% elif m.tool_calls %}<|im_start|>{{ m.role }}<call>
{{- m.tool_calls[0].function.arguments | tojson }}<|end|>
{%- for r in messages if r.role == 'tool' %}<result>{{ r.content }}</result>{% endfor %}{{ m.content }}
{%- else %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant {% endif %}"""
    chat = habit(template, "<|end|>", stops=("<|end|>", "<|im_end|>"))
    ids = chat.opening([{"role": "user", "content": "Hi"}])
    sampled = chat.rendering.encode('<call>{"at": "a"}<|end|>')
    after = chat.continued(ids + array("i", sampled), [RESULT], [CALL])
    assert chat.rendering.text(after[len(ids) :]) == '<call>{"at": "a"}<|end|><result>sunny</result>'


def test_a_tag_is_no_place_where_a_prompt_and_a_history_part() -> None:
    """A prompt opens thinking where a history closes it: both begin with the same sign."""
    template = """{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == 'assistant' %}</think>{{ m.content.split('</think>')[-1] }}{% else %} {{ m.content }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<think>{% endif %}"""
    chat = habit(template)
    asked = [{"role": "user", "content": "Hi"}]
    history = [*asked, {"role": "assistant", "content": "Yes."}, *asked]
    said = {1: chat.rendering.encode("Hmm.</think>Yes.<|im_end|>")}
    assert chat.rendering.text(chat.spliced(history, said, keep_thinking=False)) == chat.rendering.render(history)
    whole = chat.rendering.text(chat.spliced(history, said, keep_thinking=True))
    assert "<|im_start|>assistant<think>Hmm.</think>Yes.<|im_end|>" in whole


def test_tags_that_a_template_knows_before_an_answer_and_not_before_a_call() -> None:
    template = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}{{ m.content }}<call>{{ m.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ m.content.split('</think>')[-1].lstrip() }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    chat = habit(template)
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL.as_message()]},
    ]
    said = {1: chat.rendering.encode('<think>\nHmm.\n</think>\n\n<call>{"at": "a"}<|im_end|>')}
    ids = chat.spliced([*history, RESULT], said, keep_thinking=False)
    assert chat.rendering.text(ids) == chat.rendering.render([*history, RESULT])


@pytest.mark.parametrize(("written", "as_text"), [("| tojson", False), ("", True)])
def test_calls_are_given_to_a_template_in_the_form_that_it_writes_as_json(written: str, as_text: bool) -> None:
    """Agents log the arguments of calls as objects or as texts; some templates write only one of them as JSON."""
    call = "{% for call in m.tool_calls or [] %}<call>{{ call.function.arguments ARGS }}{% endfor %}"
    chat = habit(CHATML_LIKE.replace("CALLS", call.replace("ARGS", written)))
    assert chat.form.calls_as_text == as_text
    asks = [CALL.as_message(), CALL.as_message()]
    asks[1]["function"]["arguments"] = '{"at": "a"}'
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": asks}, RESULT]
    assert chat.rendering.text(chat.opening(messages)).count('<call>{"at": "a"}') == 2
    for odd in ({}, {"function": None}, {"function": {"name": "look"}}, {"function": {"arguments": "[1"}}):
        messages[1]["tool_calls"] = [odd]
        with suppress(ChatError):  # a template refuses input that it cannot read by itself
            chat.opening(messages)


@pytest.mark.parametrize(
    ("where", "writes"),
    [
        ("", False),
        ("{{ messages[0].tools }}{{ 'tools' }}", False),
        ("{% for tool in tools or [] %}{{ tool.name }},{% endfor %}", True),  # in another form than most have
        ("{% if tools %}{{ tools[0].function.description }}{% endif %}", True),
        ("{% if tools and messages[0].role == 'system' %}Tools: {{ tools | tojson }}{% endif %}", True),
        ("{% if tools %}{{ raise_exception('these are no tools of mine') }}{% endif %}", True),  # says so itself
    ],
)
def test_tools_that_a_template_does_not_write_are_text(where: str, writes: bool) -> None:
    tokenizer = byte_tokenizer(where + THINKING)
    for tools in (None, [], [{"type": "function", "function": {"name": "f"}}]):
        rendering = ChatTemplate(tokenizer, STYLES["ChatML"].stop_ids, tools).rendering
        assert rendering.writes_tools == writes
        assert rendering.tools_as_text == (bool(tools) and not writes)


def test_a_header_that_was_cut_is_not_written_once_more() -> None:
    style = STYLES["gpt-oss"]
    template = ChatTemplate(style.tokenizer(), style.stop_ids, None, DATE)
    asked = {"role": "user", "content": "Hi"}
    for cut in ("<|channel|>", "<|channel|>fin", "<|channel|>final<|message|>", "<|channel|>final<|message|>Ye"):
        said = {1: style.tokenizer().encode(cut, add_special_tokens=False)}
        ids = template.spliced([asked, {"role": "assistant", "content": "Ye"}, asked], said, keep_thinking=False)
        assert f"<|start|>assistant{cut}<|end|><|start|>user" in template.rendering.text(ids)
