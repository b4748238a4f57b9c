"""Numbers and text as the page writes them. Knows no chart and no run."""

from __future__ import annotations

import html
import math
import re

_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
GAP = "\u202f"
"""A narrow space that does not break, between thousands and before a unit."""


def escaped(text: str) -> str:
    """Text for HTML, in content and in quoted attributes.

    Characters that no page may hold, and those that turn the direction of writing, are replaced by a sign for that.

    >>> escaped('<b a="1">')
    '&lt;b a=&quot;1&quot;&gt;'
    """
    return html.escape(_HARMFUL.sub("\ufffd", text), quote=True)


def breakable(name: str, separator: str = ".") -> str:
    """The name of a layer for HTML, which may go on in the next line behind a dot.

    >>> breakable("layer1.conv")
    'layer1.<wbr>conv'
    """
    return escaped(name).replace(separator, f"{separator}<wbr>")


def number(value: float | None) -> str:
    """About four figures.

    >>> number(0.53217), number(12.3456), number(0.000012), number(float("nan")), number(-3.0)
    ('0.5322', '12.35', '1.2e-05', '–', '−3')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.4g}".replace("-", "−", 1) if value < 0 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """A share as percents; what is not quite all is never written as all.

    >>> [text.replace("\\u202f", " ") for text in (percent(0.9), percent(0.99996), percent(None))]
    ['90.0 %', '99.9 %', '–']
    """
    if share is None or not math.isfinite(share):
        return "–"
    shown = 100 * share
    if 99.9 < shown < 100:
        shown = 99.9
    elif 0 < shown < 0.1:
        return f"<{GAP}0.1{GAP}%"
    return f"{shown:.1f}{GAP}%"


def count(value: int) -> str:
    """
    >>> count(1234567).replace("\\u202f", " ")
    '1 234 567'
    """
    return f"{value:,}".replace(",", GAP)


def short(value: float) -> str:
    """A number on an axis.

    >>> short(0.30000000000000004), short(1200000.0), short(0.0001), short(-2.0)
    ('0.3', '1.2M', '0.0001', '−2')
    """
    size = abs(value)
    text = f"{value / 1e6:.4g}M" if size >= 1e6 else f"{value / 1e3:.4g}k" if size >= 1e4 else f"{value:.4g}"
    return text.replace("-", "−", 1) if value < 0 else text


def shape(dims: tuple[int, ...]) -> str:
    """
    >>> shape((64, 3, 7, 7))
    '64 × 3 × 7 × 7'
    """
    return " × ".join(map(str, dims))
