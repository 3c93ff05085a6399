"""The look of buttons and selections. All tabs use these settings."""

from __future__ import annotations

from typing import Any

_FINGER = {"minWidth": 44, "minHeight": 44}  # pixels, for a finger
_PLAIN = {
    "textTransform": "none",
    "whiteSpace": "nowrap",
    "@media (pointer: coarse)": _FINGER,
}
NO_CAPITALS: dict[str, Any] = {"sx": {**_PLAIN, "& button": _PLAIN}}  # shows sim:0, not SIM:0
BUTTONS: dict[str, Any] = {"size": "small", "margin": (5, 10), **NO_CAPITALS}
SELECT: dict[str, Any] = {  # with the height of a text field
    "size": "small",
    "sx": {"& .MuiSelect-select": {"py": "8.5px"}},
}
