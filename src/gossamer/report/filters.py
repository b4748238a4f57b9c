"""Numbers and names as the report shows them; the templates use these functions as filters."""

from __future__ import annotations

import math
import re

from markupsafe import Markup, escape

GAP = "\u202f"
"""Narrow no-break space, between thousands and before a unit."""
COLOURS = 6
"""Number of colours for runs in `templates/style.css`; later runs start again with the first."""
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(value: object) -> object:
    """Replace characters that HTML forbids, and those that change the writing direction, by U+FFFD.

    >>> clean("a\\x00b"), clean(3)
    ('a\ufffdb', 3)
    """
    if isinstance(value, str) and not isinstance(value, Markup):
        return _UNSAFE.sub("\ufffd", value)
    return value


def breakable(name: str, separator: str = ".") -> Markup:
    """Escape a layer or file name and allow a line break after each separator.

    >>> str(breakable("layer1.conv"))
    'layer1.<wbr>conv'
    """
    return Markup(str(escape(clean(name))).replace(separator, f"{separator}<wbr>"))


def number(value: float | None) -> str:
    """Four significant digits.

    >>> number(0.53217), number(12.3456), number(0.000012), number(float("nan")), number(-3.0)
    ('0.5322', '12.35', '1.2e-05', '–', '−3')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.4g}".replace("-", "−", 1) if value < 0 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """A share in percent; a share below 1 is never rounded up to 100 %.

    >>> [text.replace(GAP, " ") for text in (percent(0.9), percent(0.99996), percent(None))]
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
    >>> count(1234567).replace(GAP, " ")
    '1 234 567'
    """
    return f"{value:,}".replace(",", GAP)


def compact(value: int) -> str:
    """A count in three digits.

    >>> compact(36864).replace(GAP, " "), compact(640)
    ('36.9 k', '640')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.3g}{GAP}{unit}"
    return str(value)


def shape(dims: tuple[int, ...]) -> str:
    """
    >>> shape((64, 3, 7, 7))
    '64 × 3 × 7 × 7'
    """
    return " × ".join(map(str, dims))


def filesize(size: int) -> str:
    """
    >>> filesize(44_775_912).replace(GAP, " "), filesize(2_300).replace(GAP, " ")
    ('44.8 MB', '2.3 kB')
    """
    return f"{size / 1e6:.1f}{GAP}MB" if size >= 1e5 else f"{size / 1e3:.1f}{GAP}kB"


def duration(value: float) -> str:
    """A time in the unit of its table.

    >>> duration(0.4187), duration(41.87), duration(24548.0).replace(GAP, " ")
    ('0.419', '41.9', '24 548')
    """
    return count(round(value)) if value >= 100 else f"{value:.3g}"


def css_percent(share: float) -> str:
    """
    >>> css_percent(1 / 3)
    '33.3%'
    """
    return f"{100 * share:.1f}%"


def colour(run: int | None) -> str:
    """The style that gives an element the colour of a run, or grey.

    >>> colour(7), colour(None)
    ('--k:var(--c1)', '--k:var(--before)')
    """
    return "--k:var(--before)" if run is None else f"--k:var(--c{run % COLOURS})"


def heat(value: float) -> str:
    """The background of a cell: darker for a larger output change, and light enough for its text."""
    share = 0.6 * min(max(value, 0.0), 1.0) ** 0.5 if math.isfinite(value) else 0.6
    return f"background:rgba(var(--wash),{share:.2f})"


FILTERS = {
    function.__name__: function
    for function in (
        breakable, number, percent, count, compact, shape, filesize, duration, css_percent, colour, heat
    )
}  # fmt: skip
