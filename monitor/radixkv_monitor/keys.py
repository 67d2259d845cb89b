"""The keys that work in every view, and the keys of a view as the help lists them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from textual.binding import Binding

from radixkv_monitor.views import VIEWS, View

_PACKAGE = __name__.partition(".")[0]
SCRUB_STEP, SCRUB_LEAP = 5.0, 60.0
"""The seconds that the keys for the past move."""

KEYS: tuple[Binding, ...] = (
    *(
        Binding(str(at), f"view('{view.name}')", view.title, show=False, tooltip=view.about, priority=True)
        for at, view in enumerate(VIEWS, 1)
    ),
    Binding("question_mark", "help", "Help", tooltip="show this help"),
    Binding("space", "freeze", "Freeze", tooltip="freeze the screen, or resume; a recording pauses"),
    Binding(
        "left_square_bracket",
        f"scrub({-SCRUB_STEP})",
        "Past",
        tooltip="go back 5 seconds; the last ten minutes are kept",
    ),
    Binding("right_square_bracket", f"scrub({SCRUB_STEP})", "forward", show=False, tooltip="go forward 5 seconds"),
    Binding("left_curly_bracket", f"scrub({-SCRUB_LEAP})", "back", show=False, tooltip="go back a minute"),
    Binding("right_curly_bracket", f"scrub({SCRUB_LEAP})", "forward", show=False, tooltip="go forward a minute"),
    Binding("less_than_sign", "speed(-1)", "slower", show=False, tooltip="play a recording slower"),
    Binding("greater_than_sign", "speed(1)", "faster", show=False, tooltip="play a recording faster"),
    Binding("g", "switch", "Engines", show=False, tooltip="watch another running engine"),
    Binding("i", "info", "Info", show=False, tooltip="show the verdict and the selected item in full"),
    Binding("v", "verdicts", "Verdicts", show=False, tooltip="show the log of verdict changes"),
    Binding("b", "baseline", "Baseline", tooltip='count "run" from now on; again: from the start'),
    Binding("r", "record", "Record", tooltip="start or stop recording to a file in the current folder"),
    Binding("e", "export", "Export", tooltip="export this view to a file: JSON, CSV or SVG"),
    Binding("y", "copy('text')", "Copy", show=False, tooltip="copy the description of the selected item"),
    Binding("Y", "copy('json')", "Copy", show=False, tooltip="copy the selected item as JSON"),
    Binding("m", "maximise", "Maximise", show=False, tooltip="hide or show the lines around the view"),
    Binding("t", "theme", "Theme", show=False, tooltip="switch between the dark and the light theme"),
    Binding("ctrl+z", "suspend_process", "Suspend", show=False, tooltip="suspend to the shell; fg resumes"),
    Binding("q", "quit", "Quit", tooltip="quit"),
    Binding("ctrl+c", "quit", "Quit", show=False, priority=True, tooltip="quit from any screen"),
)


def shown_bindings(view: View) -> Iterable[Binding]:
    """List the bindings of a view and its widgets, each key once, except the keys that edit text."""
    known: set[str] = set()
    for widget in (view, *view.query("*").exclude("FilterInput")):
        kinds = [kind for kind in type(widget).__mro__ if kind.__module__.startswith(_PACKAGE)]
        for binding in Binding.make_bindings(chain.from_iterable(vars(kind).get("BINDINGS", ()) for kind in kinds)):
            offered = not binding.action.startswith("control(") or view.check_action("control", ())
            if binding.key not in known and binding.description and offered:
                known.add(binding.key)
                yield binding
