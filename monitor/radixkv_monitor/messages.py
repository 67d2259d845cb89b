"""What views tell the app: that a node, a block or a request was selected, so that other views can show it, too."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


@dataclass(frozen=True, slots=True)
class Selection:
    """What is selected, of each kind; None: nothing of that kind."""

    node: int | None = None
    block: int | None = None
    request: int | None = None


class Selected(Message):
    """A view selected something. With `show`, the view that is home to it comes to the front."""

    kind = ""
    home = ""

    def __init__(self, number: int, *, show: bool = False) -> None:
        super().__init__()
        self.number = number
        self.show = show


class NodeSelected(Selected):
    """A node of the tree was selected."""

    kind, home = "node", "tree"


class BlockSelected(Selected):
    """A block of the pool was selected."""

    kind, home = "block", "pool"


class RequestSelected(Selected):
    """A request was selected, by its number."""

    kind, home = "request", "requests"
