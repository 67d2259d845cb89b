"""The filter line of a view: every key that is typed after `/` arrives in it, at any speed.

Textual hands a key to the widget that has the focus when the key arrives. `Widget.focus` takes effect later, and a key
binding runs after keys that have arrived already. So the view moves the focus at once, its `/` is a priority binding,
and this input leaves keys that it received too early to the widget that has the focus now.
"""

from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.widget import Widget
from textual.widgets import Input


def focus_now(widget: Widget) -> None:
    """Move the focus to a widget, before the next key arrives."""
    widget.screen.set_focus(widget, scroll_visible=False)


class FilterInput(Input):
    """An input that `enter` and `escape` leave.

    `accept` gets the text that was entered, and `clear` is called for escape. Both must move the focus by `focus_now`.
    """

    def __init__(self, placeholder: str, accept: Callable[[str], None], clear: Callable[[], None]) -> None:
        super().__init__(placeholder=placeholder, compact=True)
        self._accept, self._clear = accept, clear

    async def _on_key(self, event: events.Key) -> None:
        focused = self.screen.focused
        if focused is not self:
            event.prevent_default()
            event.stop()
            if focused is not None:
                focused.post_message(events.Key(event.key, event.character))
        elif event.key in ("enter", "escape"):
            event.prevent_default()
            event.stop()
            if event.key == "enter":
                self._accept(self.value)
            else:
                self._clear()
        else:
            await super()._on_key(event)
