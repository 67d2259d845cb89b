"""The day on which a conversation began, for templates that write the date.

Knows: how a template asks for it. A template that was rendered after midnight would write another day into the system
prompt, and the whole conversation would have to be computed again; so the clock of a conversation stands still. What is
rendered once, for `warm` or `submit`, has the day's date as well: it finds what conversations of that day left there.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from radixkv.errors import InvalidInput

_FORM = "%d %b %Y"
_CLOCK = "strftime_now"  # the function that transformers gives to templates; it reads the clock of the machine
# In front of a template, this takes the place of the function. The line's end is the block's, and not the template's.
_STANDING_CLOCK = """{%- macro strftime_now(format) %}
{%- set shown = namespace(text=format) %}
{%- for code, text in pinned_date.items() %}{% set shown.text = shown.text.replace(code, text) %}{% endfor %}
{{- shown.text }}
{%- endmacro %}
"""


def today() -> str:
    """The date as sessions keep it: 21 Nov 2026."""
    return datetime.date.today().strftime(_FORM)


def pinned(template: str, date: str) -> tuple[str, Mapping[str, Any]]:
    """The template with a clock that stands at the beginning of `date`, and the variables to render it with."""
    if _CLOCK not in template:
        return template, {"date_string": date}
    return _STANDING_CLOCK + template, {"date_string": date, "pinned_date": dict(_codes(date))}


def check_date(date: object) -> str:
    """The date itself; raises InvalidInput unless it is as `today` writes it."""
    try:
        datetime.datetime.strptime(str(date), _FORM)
    except ValueError as error:
        raise InvalidInput(f"a conversation's date is written as {today()!r}, not {date!r}") from error
    return str(date)


@lru_cache(maxsize=64)
def _codes(date: str) -> tuple[tuple[str, str], ...]:
    """What stands for each code of strftime, in the order in which they are to be replaced."""
    moment = datetime.datetime.strptime(date, _FORM)
    letters = "aAbBcdDefFgGhHIjklmMpPrRSTuUVwWxXyYzZ"
    codes = {code: moment.strftime(code) for letter in letters for code in (f"%{letter}", f"%-{letter}")}
    return (("%%", "\0"), *codes.items(), ("\0", "%"))
