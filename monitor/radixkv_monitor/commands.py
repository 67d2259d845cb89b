"""The command palette, for hasty hands: keys that come before its list is drawn, or after it has answered, do nothing.

Knows Textual's palette and where that trips over its own feet (8.2). Does not know the commands.
"""

from __future__ import annotations

from textual.await_complete import AwaitComplete
from textual.command import CommandPalette
from textual.message import Message
from textual.widgets import Button, Input, OptionList


class HastyPalette(CommandPalette):
    """Answers once."""

    _answered = False

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close it; from then on it is deaf."""
        if self._answered:
            return AwaitComplete()
        self._answered = True
        return super().dismiss(result)

    async def _dispatch_message(self, message: Message) -> None:
        # A second enter may be queued already when the first one closes the palette.
        if not (self._answered and isinstance(message, Input.Submitted | Button.Pressed | OptionList.OptionSelected)):
            await super()._dispatch_message(message)

    def _action_command_list(self, action: str) -> None:
        try:
            super()._action_command_list(action)
        except KeyError:  # the lines of the list are not laid out yet
            return
