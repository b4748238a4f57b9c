"""Suggestions of the nearest name: what difflib finds, in bounded time."""

from __future__ import annotations

import difflib

import torch
import torchvision

from gossamer.errors import MAX_SUGGESTED, GossamerError, nearest
from gossamer.model import match
from gossamer.recipe import load
from tests.fuzz.harness import attempt


def parameters_of_resnet152() -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in torchvision.models.resnet152().named_parameters()]


def test_a_typo_among_hundreds_of_names_finds_what_difflib_finds() -> None:
    names = parameters_of_resnet152()
    for index, name in enumerate(names[::9]):
        place = index % len(name)
        typo = name[:place] + "q" + name[place + 1 :]
        [expected] = difflib.get_close_matches(typo, names, n=1, cutoff=0.5)
        found = nearest(typo, names).removeprefix("; nearest: ").strip("'")
        ratio = difflib.SequenceMatcher(None, found, typo).ratio
        assert found == expected or ratio() == difflib.SequenceMatcher(None, expected, typo).ratio()


def test_many_unknown_variables_among_many_known_ones_take_little_time() -> None:
    known = "\n".join(f"variable_{index:05d}: {index}" for index in range(5_000))
    unknown = ", ".join(f"eval(varable_{index})" for index in range(150))
    refused = f"{known}\nx: [{unknown}]\nmodifiers: [!EpochRangeModifier {{start_epoch: 0, end_epoch: 1}}]"
    messages: list[str] = []

    def read() -> None:
        try:
            load(refused)
        except GossamerError as error:
            messages.extend(str(error).splitlines())
            raise

    assert not attempt(read)
    assert len(messages) == 150
    assert sum("nearest" in message for message in messages) == MAX_SUGGESTED


def test_many_unknown_parameters_take_little_time() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet152()
    assert not attempt(lambda: match(model, [f"layr1.{index}.conv1.weight" for index in range(5000)]))
    assert attempt(lambda: match(model, [*(f"layr1.{index}" for index in range(5000)), "fc"], strict=False))


def test_a_very_long_name_has_no_nearest_one() -> None:
    assert attempt(lambda: nearest("a" * 100_000, ["a" * 99_999] * 100))
    assert nearest("a" * 100_000, ["a" * 99_999]) == ""
