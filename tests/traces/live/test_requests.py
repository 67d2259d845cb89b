"""Prompts made up from block ids share exactly the recorded prefixes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import InvalidInput
from radixkv_traces.chats import ChatRequest
from radixkv_traces.formats import TraceRequest
from radixkv_traces.live.requests import PromptMaker, plan_requests

VOCABULARY = 1 << 20  # large, so that nothing is shared by chance


def request(blocks, length=None, *, output=7, timestamp=0.0, block_tokens=None):
    length = 16 * len(blocks) if length is None else length
    return TraceRequest(timestamp, length, output, np.array(blocks, dtype=np.int64), block_tokens=block_tokens)


def shared(one, other):
    """The length of the common prefix of two prompts."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


@given(
    st.lists(st.integers(0, 2**62), max_size=5, unique=True),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=4, unique=True),
    st.sampled_from([1, 2, 16]),
    st.integers(0, 15),
)
def test_prompts_share_exactly_what_their_blocks_share(head, one, other, shrink, cut):
    if one[0] == other[0] or {one[0], other[0]} & set(head):
        return
    prompt_maker = PromptMaker(VOCABULARY, 16, shrink=shrink)
    lengths = [16 * (len(head) + len(tail)) - cut for tail in (one, other)]
    first, second = (
        prompt_maker.prompt(request([*head, *tail], length)) for tail, length in zip((one, other), lengths, strict=True)
    )
    assert [len(first), len(second)] == [-(-length // shrink) for length in lengths]
    assert shared(first, second) == len(head) * (16 // shrink)


def test_a_prompt_is_the_same_in_every_process():
    prompt = PromptMaker(1000, 4, seed=3).prompt(request([5, 6], 7, block_tokens=4))
    assert prompt.dtype == np.int32 and prompt.tolist() == [736, 724, 612, 569, 4, 740, 459]


def test_an_end_that_no_block_names_is_made_up_and_unshared():
    prompt_maker = PromptMaker(VOCABULARY, 16)
    one, other = prompt_maker.prompt(request([1], 40)), prompt_maker.prompt(request([1], 40, timestamp=9.0))
    assert len(one) == len(other) == 40
    assert shared(one, other) == 16


def test_the_size_that_a_line_gives_its_blocks_comes_first():
    prompt_maker = PromptMaker(VOCABULARY, 16)
    one = prompt_maker.prompt(request([1, 2], 8, block_tokens=4))
    other = prompt_maker.prompt(request([1, 3], 8, block_tokens=4))
    assert shared(one, other) == 4


def test_answers_have_the_recorded_length_at_least_one_token_and_at_most_the_limit():
    prompt_maker = PromptMaker(10, 16, shrink=4)
    lengths = [prompt_maker.output_tokens(request([1], output=output)) for output in (0, 1, 4, 5, 400)]
    assert lengths == [1, 1, 1, 2, 100]
    assert prompt_maker.output_tokens(request([1], output=400), 30) == 30
    reply = {"role": "assistant", "content": "x" * 40}
    assert prompt_maker.output_tokens(ChatRequest(0.0, ({"role": "user", "content": "Hi"},), "a", 1, None, reply)) == 10
    assert prompt_maker.output_tokens(ChatRequest(0.0, ({"role": "user", "content": "Hi"},), "a", 1, 6, reply)) == 6


def test_messages_are_sent_as_they_are():
    messages = ({"role": "user", "content": "Hi"},)
    assert PromptMaker(10, 16, shrink=4).prompt(ChatRequest(0.0, messages, "a", 1)) == list(messages)


@pytest.mark.parametrize("shrink", [0, -1, 17])
def test_a_block_keeps_at_least_a_token(shrink):
    with pytest.raises(InvalidInput, match="1 to the tokens of a recorded block, 16"):
        PromptMaker(10, 16, shrink=shrink)


def test_asks_are_in_the_order_of_time_and_times_begin_at_the_first():
    recorded = [request([at], timestamp=float(at)) for at in (9000, 5000, 7000, 5000)]
    found = plan_requests(recorded, PromptMaker(10, 16))
    assert [(request.number, request.due, request.recorded.blocks[0]) for request in found] == [
        (0, 0.0, 5000),
        (1, 0.0, 5000),
        (2, 2.0, 7000),
        (3, 4.0, 9000),
    ]
    assert plan_requests([], PromptMaker(10, 16)) == []
