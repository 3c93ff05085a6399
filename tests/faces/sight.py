"""How people see colours: the contrast and the distance of two colours, also for colour-blind people.

Colour blindness is simulated as by Machado, Oliveira & Fernandes 2009, at full severity, in linear RGB. The distance
is CIEDE2000 (Sharma, Wu & Dalal 2005); people can just tell two colours apart at a distance of about 1. The contrast
is that of WCAG 2.2.
"""

import numpy as np

SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ]),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ]),
    "tritanopia": np.array([
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ]),
}  # fmt: skip
_XYZ = np.array([
    [0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041],
])  # fmt: skip


def linear(colour: str) -> np.ndarray:
    """The colour `#rrggbb` as linear light, each part from 0 to 1."""
    rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, 1 to 21. WCAG requires 3 for drawings, and 4.5 for text.

    >>> round(contrast("#000000", "#ffffff"))
    21
    """
    low, high = sorted(float(_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def distance(one: str, other: str, sight: str = "normal") -> float:
    """The distance CIEDE2000 of two colours for people with this `sight`."""
    return ciede2000(_lab(one, sight), _lab(other, sight))


def _lab(colour: str, sight: str) -> np.ndarray:
    xyz = _XYZ @ np.clip(SIGHT[sight] @ linear(colour), 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def ciede2000(one: np.ndarray, other: np.ndarray) -> float:
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(mean**7 / (mean**7 + 25**7))
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * stretch)) % 360 for a, b in ((a1, b1), (a2, b2)))
    both = c1 * c2 != 0
    turn = (h2 - h1 + 180) % 360 - 180 if both else 0.0
    hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn) / 2)
    lm, cm, hm = (l1 + l2) / 2, (c1 + c2) / 2, (h1 + turn / 2) % 360 if both else h1 + h2
    waves = ((-0.17, hm - 30), (0.24, 2 * hm), (0.32, 3 * hm + 6), (-0.2, 4 * hm - 63))
    t = 1 + sum(part * np.cos(np.radians(angle)) for part, angle in waves)
    sl, sc = 1 + 0.015 * (lm - 50) ** 2 / np.sqrt(20 + (lm - 50) ** 2), 1 + 0.045 * cm
    sh = 1 + 0.015 * cm * t
    turned = np.sin(np.radians(60 * np.exp(-(((hm - 275) / 25) ** 2))))
    rotation = -2 * np.sqrt(cm**7 / (cm**7 + 25**7)) * turned
    dl, dc, dh = (l2 - l1) / sl, (c2 - c1) / sc, hue / sh
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh))
