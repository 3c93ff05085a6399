"""The contents of the dialog before an action: a text, the button Cancel, and the button that confirms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import param
from panel.custom import JSComponent


class ConfirmationForm(JSComponent):
    """The contents of the dialog: a text and two buttons.

    A press of a button calls `answered` with `confirm` or `cancel`, and with the number of the question.
    """

    lines = param.List([], doc="The text, one paragraph each.")
    confirm = param.String("", doc="Label of the button that confirms.")
    grave = param.Boolean(False, doc="Whether the action takes memory from a process.")
    question = param.Integer(0, doc="The number of the question.")

    _esm = "confirmation.js"
    _stylesheets = ["confirmation.css"]

    def __init__(self, answered: Callable[[str, int], None], **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", **params)
        self._answered = answered

    def _handle_msg(self, data: Any) -> None:
        """Handles a message from the browser, which is untrusted input and can be anything."""
        if isinstance(data, dict) and data.get("answer") in ("confirm", "cancel"):
            self._answered(data["answer"], data.get("question", 0))
