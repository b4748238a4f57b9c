"""The learning rate of a recipe, from `init_lr` at the beginning to `final_lr` at the end."""

from __future__ import annotations

import math

from gossamer.create.choices import Choices
from gossamer.create.text import Piece, Variable

CYCLES = 4
"""About how many cycles `cyclic_linear` has."""
DROPS = 4
"""How often `stepped` goes down; each part of the run between two drops is as long as the others."""
_FINE_DROPS = 9
_WORDS = {
    "linear": "The learning rate falls in a straight line.",
    "cosine": "The learning rate falls along half a cosine.",
    "cyclic_linear": "The learning rate falls in a straight line, again and again.",
    "constant": "The learning rate stays the same.",
    "stepped": "The learning rate falls in steps of one factor.",
    "exponential": "The learning rate falls by one factor after every epoch, in a run of more than one.",
}


def rates(choices: Choices, steps_per_epoch: float | None) -> tuple[list[Variable], list[Piece]]:
    """Variables and modifiers for the learning rate; neither when the recipe leaves it alone."""
    if choices.lr is None:
        return [], []
    variables = [Variable("init_lr", choices.variables.init_lr, "the learning rate at the beginning")]
    words = [_WORDS[choices.lr]]
    if choices.lr == "constant":
        return variables, [
            Piece("SetLearningRateModifier", {"start_epoch": 0.0, "learning_rate": "eval(init_lr)"}, words)
        ]
    variables.append(Variable("final_lr", choices.final_lr, "and at the end"))
    whole: dict[str, object] = {"start_epoch": 0.0, "end_epoch": "eval(num_epochs)"}
    both: dict[str, object] = {"init_lr": "eval(init_lr)", "final_lr": "eval(final_lr)"}
    if choices.lr in ("stepped", "exponential"):
        return variables, [_by_factor(choices.lr, choices.variables.num_epochs, whole, words)]
    fields = {**whole, "lr_func": choices.lr, **both}
    if choices.lr == "cyclic_linear":
        count = _cycles(choices.variables.num_epochs, steps_per_epoch)
        told = "from init_lr to final_lr; whole cycles fill the run"
        variables.append(Variable("cycle_epochs", f"eval(num_epochs / {count})", told))
        fields["cycle_epochs"] = "eval(cycle_epochs)"
    return variables, [Piece("LearningRateFunctionModifier", fields, words)]


def _by_factor(kind: str, num_epochs: float, whole: dict[str, object], words: list[str]) -> Piece:
    kwargs: dict[str, object]
    if kind == "exponential" and num_epochs > 1:
        kwargs = {"gamma": "eval((final_lr / init_lr) ** (1 / max(ceil(num_epochs) - 1, 1)))"}
        return Piece(
            "LearningRateModifier",
            {**whole, "lr_class": "ExponentialLR", "lr_kwargs": kwargs, "init_lr": "eval(init_lr)"},
            words,
        )
    drops = DROPS
    if kind == "exponential":
        drops, words = _FINE_DROPS, [f"The learning rate falls by one factor, {_FINE_DROPS} times in the run."]
    kwargs = {
        "gamma": f"eval((final_lr / init_lr) ** (1 / {drops}))",
        "milestones": [f"eval(num_epochs * {drop} / {drops + 1})" for drop in range(1, drops + 1)],
    }
    return Piece(
        "LearningRateModifier",
        {**whole, "lr_class": "MultiStepLR", "lr_kwargs": kwargs, "init_lr": "eval(init_lr)"},
        words,
    )


def _cycles(num_epochs: float, steps_per_epoch: float | None) -> int:
    """How many cycles fill the run such that each has whole epochs, or at least whole steps.

    >>> _cycles(20.0, None), _cycles(10.0, None), _cycles(2.5, 10)
    (4, 5, 5)
    """
    whole = num_epochs if num_epochs.is_integer() else None
    if whole is None or whole < CYCLES / 2:
        whole = round(num_epochs * steps_per_epoch) if steps_per_epoch else None
    if not whole:
        return CYCLES
    counts = [count for count in range(2, math.floor(whole) + 1) if whole % count == 0] or [1]
    return min(counts, key=lambda count: (abs(count - CYCLES), count))
