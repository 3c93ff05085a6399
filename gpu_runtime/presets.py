"""The settings that are recommended for a card of a given size.

Source: the documentation of Semantik, a memory manager whose features this project continues,
"Recommended Configurations by VRAM Size".
"""

from __future__ import annotations

import re

from .errors import BadSetting

PRESETS: dict[str, dict[str, str]] = {
    "24GB": {"GPU_MEMORY_MAX_PERCENT": "0.90"},
    "16GB": {"GPU_MEMORY_MAX_PERCENT": "0.90", "ENABLE_CPU_OFFLOAD": "true"},
    "8GB": {
        "GPU_MEMORY_MAX_PERCENT": "0.85",
        "ENABLE_CPU_OFFLOAD": "true",
        "EVICTION_IDLE_THRESHOLD_SECONDS": "60",
    },
    "4GB": {
        "GPU_MEMORY_MAX_PERCENT": "0.80",
        "ENABLE_CPU_OFFLOAD": "true",
        "EVICTION_IDLE_THRESHOLD_SECONDS": "30",
    },
}


_LARGEST_PRESET = 24  # GB
_CARD_SIZE = re.compile(r"\s*([0-9]{1,6})\s*G(?:i?B)?\s*\+?\s*", re.IGNORECASE)


def preset(name: str) -> dict[str, str]:
    """The environment variables recommended for a card of the size `name`, such as 8GB.

    A card larger than 24 GB gets the variables of the preset 24GB. Raises BadSetting for any other
    size without a preset.

    >>> preset("8gb")["GPU_MEMORY_MAX_PERCENT"], preset("80GB") == preset("24GB+")
    ('0.85', True)
    """
    size = _CARD_SIZE.fullmatch(str(name))
    is_large = size is not None and int(size[1]) >= _LARGEST_PRESET
    found = PRESETS.get(f"{_LARGEST_PRESET if is_large else int(size[1])}GB") if size else None
    if found is None:
        raise BadSetting("preset", name, f"one of {', '.join(PRESETS)}; larger cards use 24GB")
    return dict(found)
