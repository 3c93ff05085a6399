"""Tool calls that arrive in parts: an engine may send the arguments of a call in many chunks."""

from __future__ import annotations

from typing import Any


class CallParts:
    """The tool calls of one streamed answer, as far as they have arrived."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, part: dict[str, Any]) -> None:
        """Adds one `part`, as it is in `delta.tool_calls` of a chunk."""
        new = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        known = self._calls.setdefault(part.get("index", 0), new)
        known["id"] = known["id"] or part.get("id") or ""
        for name in ("name", "arguments"):
            known["function"][name] += (part.get("function") or {}).get(name) or ""

    def calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's format."""
        return list(self._calls.values())
