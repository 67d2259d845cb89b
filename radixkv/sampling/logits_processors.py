"""Logits processors: objects that change logits before sampling, for penalties, bias, minimum length and bad words.

`PROCESSORS` are applied in order. A parameter that is declared with `adjusts_logits` needs a processor in this list.
The custom processors of an engine follow them. A beam search passes log probabilities in place of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from radixkv.device import device_of
from radixkv.errors import InvalidInput
from radixkv.sampling.params import SampleRow, SamplingParams


class LogitsProcessor(Protocol):
    """Changes the logits of some rows of each batch before their tokens are sampled.

    One thread calls a processor: the engine's, and once at `applies` the thread that submits a request. It may be
    called again for the same rows after a call of it, or of another processor, raised an exception. So a processor has
    no state that counts its calls, and a row's result depends on nothing but that row.

    `reads_history` says whether the processor reads `SampleRow.history` or `SampleRow.position`. Its rows then sample
    in every other step at most in an engine that launches steps ahead. If it is False, the history of a row may lack
    the last token.
    """

    reads_history: bool = True

    def applies(self, params: SamplingParams) -> bool:
        """Return whether the processor changes the rows of a request with these parameters.

        Called for each row of each step, so that it must be cheap: usually a lookup in `params.extra_args`. It is
        called first when a request is submitted, which is refused with InvalidInput if this raises.
        """
        ...

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        """Change logits [len(rows), vocab] in place, one row for each of `rows`.

        The tensor has the model's dtype and device, and is a copy. A logit of -inf excludes its token. An exception
        fails the requests of these rows, and no others.
        """
        ...


class Share(NamedTuple):
    """A processor and the places of the rows in a batch that it applies to; at least one."""

    process: LogitsProcessor
    places: list[int]


Shares: TypeAlias = list[Share]


def shares(
    rows: Sequence[SampleRow], custom: Sequence[LogitsProcessor], skip: Sequence[LogitsProcessor] = ()
) -> Shares:
    """Return the processors that apply to some of the rows, each with these rows: `PROCESSORS`, then `custom`.

    Leaves out the processors `skip` of `PROCESSORS`.
    """
    adjusted = [at for at, row in enumerate(rows) if row.params.adjusts_logits]
    own = [process for process in PROCESSORS if process not in skip] if adjusted else []
    chosen = [(process, adjusted) for process in own] + [(process, range(len(rows))) for process in custom]
    found = (Share(process, [at for at in places if process.applies(rows[at].params)]) for process, places in chosen)
    return [share for share in found if share.places]


def process_shares(found: Shares, logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Change contiguous logits [rows, vocab] in place by each processor, in one call for all of its rows.

    The host waits for nothing. The number of launches depends on the processors only. Raises InvalidInput for a
    processor that returns a value or changes the shape of the logits.
    """
    for process, places in found:
        if isinstance(process, RowProcessor):
            for at in places:
                process.change(logits[at], rows[at])
        elif len(places) == len(rows):
            _process(process, logits, rows)
        else:
            index = device_of(logits.device).upload(np.array(places, np.int64))
            part = logits.index_select(0, index)
            _process(process, part, [rows[at] for at in places])
            logits.index_copy_(0, index, part)


def _process(process: LogitsProcessor, logits: Tensor, rows: Sequence[SampleRow]) -> None:
    shape = logits.shape
    returned: object = process(logits, rows)  # type: ignore[func-returns-value]
    if returned is not None:
        raise InvalidInput(
            f"the logits processor {name_of(process)} returned {type(returned).__name__}: it must change the logits in "
            "place and return None"
        )
    if logits.shape != shape:
        raise InvalidInput(
            f"the logits processor {name_of(process)} changed the shape of the logits from {tuple(shape)} to "
            f"{tuple(logits.shape)}"
        )


def name_of(process: LogitsProcessor) -> str:
    """Return the name of a processor for messages: its class's name."""
    return type(process).__name__


def read_history(processors: Sequence[LogitsProcessor], params: SamplingParams) -> bool:
    """Return whether one of the custom processors reads the history of rows with these parameters.

    Raises InvalidInput if a processor refuses the parameters, that is, if its `applies` raises.
    """
    applied = []
    for process in processors:
        try:
            if process.applies(params):
                applied.append(process)
        except Exception as error:
            raise InvalidInput(f"the logits processor {name_of(process)} refuses the parameters: {error}") from error
    return any(process.reads_history for process in applied)


def nothing_to_draw(processors: Sequence[LogitsProcessor], params: SamplingParams) -> InvalidInput:
    """Return the error for a row whose processed logits have no finite maximum; it names the custom processors."""
    names = ", ".join(name_of(process) for process in processors if process.applies(params))
    message = "the logits have no finite maximum: the sampling parameters leave nothing to draw"
    return InvalidInput(f"{message}, or a logits processor has left NaN or only -inf ({names})" if names else message)


def adjusted(logits: Tensor, rows: Sequence[SampleRow], custom: Sequence[LogitsProcessor] = ()) -> Tensor:
    """Return a copy of logits [rows, vocab] with all processors applied; `logits` itself if none applies.

    Raises InvalidInput for a bias of a token id beyond the vocabulary, and as `process_shares`.
    """
    found = shares(rows, custom)
    if not found:
        return logits
    copy = logits.clone(memory_format=torch.contiguous_format)
    process_shares(found, copy, rows)
    return copy


@dataclass(eq=False)
class RowProcessor:
    """A LogitsProcessor that changes a few entries of each row by itself, so that no rows are copied for it.

    `change` changes the logits [vocab] of one row in place, if `given` is true for its parameters.
    """

    given: Callable[[SamplingParams], bool]
    change: Callable[[Tensor, SampleRow], None]
    reads_history: bool = True

    def applies(self, params: SamplingParams) -> bool:
        """See LogitsProcessor."""
        return self.given(params)

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        """See LogitsProcessor."""
        for values, row in zip(logits, rows, strict=True):
            self.change(values, row)


# index_select and scatter_ take a tenth of the time of indexing by a tensor.


def _penalise_repetition(values: Tensor, row: SampleRow) -> None:
    """Make the tokens of prompt and reply less likely. A token that occurs twice is penalised once."""
    seen, penalty = _tensor(row.history, values), row.params.repetition_penalty
    found = values.index_select(0, seen)
    values.scatter_(0, seen, torch.where(found > 0, found / penalty, found * penalty))


def _penalise_reply(values: Tensor, row: SampleRow) -> None:
    """Subtract the presence penalty once, and the frequency penalty per occurrence, from the reply's tokens."""
    tokens, counts = torch.unique(_tensor(row.history[row.prompt_length :], values), return_counts=True)
    lost = row.params.presence_penalty + row.params.frequency_penalty * counts
    values.scatter_(0, tokens, (values.index_select(0, tokens) - lost).to(values.dtype))


def _add_bias(values: Tensor, row: SampleRow) -> None:
    """Add the bias of each token that has one."""
    bias = row.params.logit_bias
    check_bias(bias, len(values))
    added = torch.tensor(list(bias.values()), dtype=values.dtype, device=values.device)
    values.index_add_(0, _tensor(list(bias), values), added)


def _mask_stop_tokens(values: Tensor, row: SampleRow) -> None:
    """Mask the stop tokens while the reply is shorter than `min_tokens`."""
    drawn = max(len(row.history) + row.in_flight - row.prompt_length, 0)
    if drawn < row.params.min_tokens:
        values.index_fill_(0, _tensor(sorted(row.stop_token_ids), values), -torch.inf)


def _mask_bad_words(values: Tensor, row: SampleRow) -> None:
    """Mask the last token of each bad word whose other tokens end the reply."""
    values.index_fill_(0, _tensor(completing_tokens(row), values), -torch.inf)


def completing_tokens(row: SampleRow) -> list[int]:
    """Return the tokens that would complete one of a row's bad words; a token may occur twice.

    Tokens of the prompt are no part of a bad word. O(words).
    """
    history, end = row.history, len(row.history)
    return [word[-1] for word in row.bad_words if _ends_with(history, end, row.prompt_length, word)]


def _ends_with(history: Sequence[int], end: int, prompt_length: int, word: tuple[int, ...]) -> bool:
    """Return whether the reply in history[prompt_length:end] ends with all tokens of a word but the last."""
    start = end - len(word) + 1
    if start == end:
        return True
    return start >= prompt_length and history[end - 1] == word[-2] and tuple(history[start:end]) == word[:-1]


PROCESSORS: list[LogitsProcessor] = [
    RowProcessor(lambda params: params.repetition_penalty != 1.0, _penalise_repetition),
    RowProcessor(lambda params: bool(params.presence_penalty or params.frequency_penalty), _penalise_reply),
    RowProcessor(lambda params: bool(params.logit_bias), _add_bias, reads_history=False),
    RowProcessor(lambda params: params.min_tokens > 0, _mask_stop_tokens, reads_history=False),  # its length is enough
    RowProcessor(lambda params: bool(params.bad_words), _mask_bad_words),
]

BATCHED = tuple(PROCESSORS)
"""The processors whose work `DeviceSampler` does itself, from the numbers that it uploads.

It calls the other processors after these. The row's history then lacks a token in flight.
"""


def check_bias(bias: Mapping[int, float], vocab: int) -> None:
    """Raise InvalidInput if a token of a bias, which is not empty, is beyond the vocabulary."""
    if max(bias) >= vocab:
        raise InvalidInput(f"logit_bias names token {max(bias)}; this model's ids end at {vocab - 1}")


def _tensor(tokens: Sequence[int], values: Tensor) -> Tensor:
    """Return token ids as a tensor where the values are."""
    return torch.from_numpy(np.asarray(tokens, dtype=np.int64)).to(values.device)
