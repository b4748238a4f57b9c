"""What a report shows of a run: plain values, ready to be drawn.

Texts are plain text and numbers are numbers; nothing here is HTML, and nothing
knows where the values come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Card:
    """One figure of the summary."""

    title: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A value over epochs; None is no value there, and breaks the line."""

    label: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    stepped: bool = False
    """Whether a value holds until the next one, as in a schedule of levels."""


@dataclass(frozen=True)
class Layer:
    """One prunable weight."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    zeros: int
    target: float | None = None
    """The sparsity that it was to reach, where that is known."""
    dense: str | None = None
    """Why it stays dense, where it does."""

    @property
    def sparsity(self) -> float:
        return self.zeros / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class Bins:
    """How the non-zero weights of a layer spread: counts in equal bins from -reach to reach.

    `reach` is a power of two, so that two of them can be brought to one scale without a remainder.
    """

    reach: float
    counts: tuple[int, ...]
    beyond: int
    """Weights outside."""
    zeros: int

    @property
    def total(self) -> int:
        return sum(self.counts) + self.beyond + self.zeros


@dataclass(frozen=True)
class WeightHistogram:
    layer: str
    before: Bins | None
    after: Bins


@dataclass(frozen=True)
class Picture:
    """Cells in rows, each from 0 (all weights of it are zero) to 15 (none is)."""

    rows: int
    columns: int
    cells: bytes


@dataclass(frozen=True)
class MaskPicture:
    """Which weights are zero: rows are output channels, columns are inputs, one kernel position after another."""

    layer: str
    weights: tuple[int, int]
    """Rows and columns of the whole layer."""
    sparsity: float
    whole: Picture
    corner: Picture | None = None
    """The first rows and columns, weight by weight, where the whole is too large for that or has groups."""
    groups: tuple[int, int] | None = None
    """(n, m) where of every m neighbours in a row at most n are kept, and nearly always n."""


@dataclass(frozen=True)
class TimedFile:
    """One file of a benchmark. Times are seconds of one run."""

    name: str
    bytes: int
    sparsity: float
    median: float
    low: float
    high: float
    """5 % of the runs are faster than `low`, 5 % slower than `high`."""
    speed: tuple[float, float | None, float | None] | None = None
    """How many times as fast as the first file, and the interval of 95 %; None for the first file itself."""
    run: int | None = None
    """The run that it belongs to, by its position on the page."""


@dataclass(frozen=True)
class SpeedTable:
    """Files that were timed against each other in one runtime, the first of them being what the others compare to."""

    title: str
    files: tuple[TimedFile, ...]


@dataclass(frozen=True)
class Speed:
    """The results of `gossamer benchmark`."""

    tables: tuple[SpeedTable, ...]
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """How far the outputs move when one layer alone is pruned to each sparsity."""

    sparsities: tuple[float, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    about: str
    """On what it was measured."""


@dataclass(frozen=True)
class RunContent:
    """Everything that the page has about one run; what is missing is empty, with the reason in `missing`."""

    name: str
    method: str
    state: str
    """How the run ended, as a sentence."""
    cards: tuple[Card, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    """Name and value of what a comparison has in its table."""
    metric: str = "metric"
    tests: tuple[Series, ...] = ()
    """The most important first."""
    sparsity: Series | None = None
    plan: Series | None = None
    """The sparsity that the schedule asks for, over the whole course."""
    loss: tuple[Series, ...] = ()
    rate: Series | None = None
    layers: tuple[Layer, ...] = ()
    histograms: tuple[WeightHistogram, ...] = ()
    """The ones that tell most first."""
    masks: tuple[MaskPicture, ...] = ()
    sensitivity: HeatMap | None = None
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    """By part (`layers`, `histograms`, `masks`, `sensitivity`, `plan`): why there is nothing to show."""
    settings: tuple[tuple[str, str], ...] = ()
    """Titles and texts, such as the config's."""
    notes: tuple[str, ...] = ()
    """What a reader must know before the rest."""
