"""Reads the images of a conversation, for models that take images.

Images are in the request itself, as `data:` URLs. This server opens no other URL: a caller could otherwise make it
read from places that only this machine can reach.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..requests import Refused, bad

MOST_IMAGES = 16  # of one request
MOST_PIXELS = 40_000_000  # of one image; 8K has 33 million
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
DETAILS = (None, "auto", "high")  # with `low`, OpenAI's models see a smaller image


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images of the `messages`, in order, as RGB images of Pillow. Raises Refused (400)."""
    urls = list(_urls(messages))
    if len(urls) > MOST_IMAGES:
        text = f"the request has {len(urls)} images; at most {MOST_IMAGES} are accepted"
        raise Refused(400, "bad_image", text, param="messages")
    return [_image(place, url) for place, url in urls]


def _urls(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields the place of each image in the `messages`, and its URL."""
    for at, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") != "image_url":
                continue
            place = f"messages[{at}].content[{number}].image_url"
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else None
            if not isinstance(url, str):
                raise bad(place, image, 'an object such as {"url": "data:image/png;base64,…"}')
            if image.get("detail") not in DETAILS:
                raise bad(f"{place}.detail", image["detail"], "auto or high")
            yield f"{place}.url", url


def _image(place: str, url: str) -> Any:
    from PIL import Image

    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        expected = "a data: URL in base64; this server opens no other URLs"
        raise bad(place, url, expected)
    try:
        # The named media type is not used, because some clients name a wrong one.
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise bad(place, url, f"an image of at most {MOST_PIXELS:,} pixels")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, binascii.Error, Image.DecompressionBombError):
        raise bad(place, url, f"an image that can be read: {', '.join(FORMATS)}") from None
