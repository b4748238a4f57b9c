"""What is wrong with data: refused with its place, or left out and counted.

Knows the two modes of `on_error` and nothing of files; readers say the sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.errors import GossamerError


@dataclass
class Problems:
    """Collects what a reader found.

    >>> problems = Problems(refuse=False)
    >>> problems.found("boxes without area, left out", "a.json: annotation 7: the box [0, 0, 0, 5] has no area")
    >>> problems.notes
    ['boxes without area, left out: 1; a.json: annotation 7: the box [0, 0, 0, 5] has no area']
    """

    refuse: bool
    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _firsts: dict[str, str] = field(default_factory=dict[str, str])

    def found(self, reason: str, sentence: str) -> None:
        """Raise the sentence, or count it under its reason."""
        if self.refuse:
            raise GossamerError(f"{sentence}; correct it, or set 'on_error: skip'")
        self.count(reason, sentence)

    def count(self, reason: str, sentence: str) -> None:
        """Count what is no reason to end in either mode."""
        self._counts[reason] = self._counts.get(reason, 0) + 1
        self._firsts.setdefault(reason, sentence)

    @property
    def notes(self) -> list[str]:
        """One sentence for each reason, with the count and the first example."""
        return [
            f"{reason}: {count}; {'' if count == 1 else 'the first: '}{self._firsts[reason]}"
            for reason, count in self._counts.items()
        ]
