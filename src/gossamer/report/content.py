"""What a report shows of a run, as plain values: texts without markup, and numbers."""

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
    """A value over epochs; None interrupts the line."""

    label: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    stepped: bool = False
    """Whether a value holds until the next one, as in a schedule of levels."""


@dataclass(frozen=True)
class LayerSparsity:
    """One prunable weight."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    zeros: int
    target: float | None = None
    """The target sparsity, if known."""
    dense: str | None = None
    """The reason why the layer stays dense, if it does."""

    @property
    def sparsity(self) -> float:
        return self.zeros / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class Bins:
    """The distribution of a layer's non-zero weights: counts in equal bins from -reach to reach.

    `reach` is a power of two, so that two of them convert exactly to one scale.
    """

    reach: float
    counts: tuple[int, ...]
    beyond: int
    """Non-zero weights outside the range."""
    zeros: int

    @property
    def total(self) -> int:
        return sum(self.counts) + self.beyond + self.zeros


@dataclass(frozen=True)
class WeightHistogram:
    """A layer at the start of the run, if known, and at the end."""

    layer: str
    before: Bins | None
    after: Bins


@dataclass(frozen=True)
class ShareGrid:
    """Cells in rows, each with its share of kept weights from 0 (none) to 15 (the most)."""

    rows: int
    columns: int
    cells: bytes


@dataclass(frozen=True)
class MaskImage:
    """The zeros of a layer: rows are output channels, columns are inputs, one kernel position after another."""

    layer: str
    weights: tuple[int, int]
    """Rows and columns of the layer."""
    sparsity: float
    whole: ShareGrid
    corner: ShareGrid | None = None
    """The first rows and columns, one weight per cell, if the layer is too large for that or has groups."""
    groups: tuple[int, int] | None = None
    """(n, m) if at most n of every m neighbours in a row are kept, and nearly always n."""


@dataclass(frozen=True)
class TimedFile:
    """One file of a benchmark. Times are seconds of one run."""

    name: str
    bytes: int
    sparsity: float
    median: float
    low: float
    high: float
    """`low` and `high` are the 5th and 95th percentile."""
    speed: tuple[float, float | None, float | None] | None = None
    """Speed relative to the first file with its 95 % interval; None for the first file."""
    run: int | None = None
    """Position on the page of the run that the file belongs to."""


@dataclass(frozen=True)
class SpeedTable:
    """Files timed against each other in one runtime; the first is the reference."""

    title: str
    files: tuple[TimedFile, ...]

    @property
    def scale(self) -> float:
        """The speed at the right end of the bars."""
        ends = [end for file in self.files if file.speed is not None for end in file.speed if end is not None]
        return 1.05 * max([1.0, *ends])

    @property
    def unit(self) -> tuple[str, float]:
        """The unit of the times, and how many of it are a second."""
        fastest = min(file.median for file in self.files)
        return ("s", 1.0) if fastest >= 1 else ("ms", 1e3) if fastest >= 1e-3 else ("µs", 1e6)


@dataclass(frozen=True)
class Speed:
    """The results of `gossamer benchmark`."""

    tables: tuple[SpeedTable, ...]
    conclusions: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """Relative output change when one layer alone is pruned to each sparsity."""

    sparsities: tuple[float, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    source: str
    """The data it was measured on."""


@dataclass(frozen=True)
class RunContent:
    """Everything that the page shows of one run. A part without values is empty; `missing` has the reason."""

    name: str
    method: str
    state: str
    """How far the run got."""
    cards: tuple[Card, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    """Columns of a comparison: name and value."""
    metric: str = "metric"
    tests: tuple[Series, ...] = ()
    """The main metric first."""
    sparsity: Series | None = None
    plan: Series | None = None
    """The sparsity of the schedule."""
    loss: tuple[Series, ...] = ()
    rate: Series | None = None
    layers: tuple[LayerSparsity, ...] = ()
    histograms: tuple[WeightHistogram, ...] = ()
    """The most informative first."""
    masks: tuple[MaskImage, ...] = ()
    sensitivity: HeatMap | None = None
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    """By part (`layers`, `histograms`, `masks`, `sensitivity`, `plan`): why it is empty."""
    settings: tuple[tuple[str, str], ...] = ()
    """Titles and texts, such as the config's."""
    notes: tuple[str, ...] = ()
    """Warnings, shown first."""
