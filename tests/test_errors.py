"""Problems as data, and suggestions of the nearest name in bounded time."""

from __future__ import annotations

import difflib
import pickle

import pytest
import torch
import torchvision

from gossamer.errors import (
    MAX_MESSAGE,
    MAX_PROBLEMS,
    MAX_SUGGESTED,
    FieldError,
    GossamerError,
    Location,
    ModifierError,
    Problem,
    Problems,
    RecipeError,
    SparsityError,
    nearest,
    within,
)
from gossamer.model import match
from gossamer.recipe import load
from tests.fuzz.harness import attempt


def test_a_problem_moves_below_keys_and_keeps_its_own_location() -> None:
    inner = Problem("expected a number", ("lr", 0), Location("inner.yaml", 2, 1), fix="write 0.1")
    moved = inner.within("trainer", location=Location("outer.yaml", 9))
    assert str(moved) == "inner.yaml:2:1: trainer.lr[0]: expected a number; write 0.1"
    assert Problem("x").within("a", location=Location("outer.yaml", 9)).location == Location("outer.yaml", 9)


def test_every_error_carries_problems() -> None:
    assert GossamerError("no such file").problems == (Problem("no such file"),)
    assert str(RecipeError([Problem("b", ("a",)), "c"])) == "a: b\nc"
    assert ModifierError("nothing matches", "params").problems == (Problem("nothing matches", ("params",)),)
    assert issubclass(FieldError, ValueError)


def test_errors_survive_pickling() -> None:
    for error in (RecipeError(Problem("x", ("a",), Location("f", 1))), ModifierError("x", "a"), FieldError("x", "a")):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), copied.problems, str(copied)) == (type(error), error.problems, str(error))


def test_within_places_an_error_and_keeps_its_class() -> None:
    with pytest.raises(SparsityError) as caught, within("GMPruningModifier", location=Location("a.yaml", 3)):
        raise SparsityError("scores are NaN")
    assert str(caught.value) == "a.yaml:3: GMPruningModifier: scores are NaN"
    assert caught.value.problems[0].key == ("GMPruningModifier",)


def test_collected_problems_are_raised_once_and_in_file_order() -> None:
    problems = Problems(RecipeError)
    problems.raise_if_any()
    problems.add("third", location=Location("b.yaml", 1))
    problems.add("second", "key", location=Location("a.yaml", 10, 2))
    problems.extend([Problem("first", ("key",), Location("a.yaml", 9))] * 2, "part")
    assert len(problems) == 3
    with pytest.raises(RecipeError) as caught:
        problems.raise_if_any()
    assert str(caught.value) == "b.yaml:1: third\na.yaml:9: part.key: first\na.yaml:10:2: key: second" == str(problems)
    with pytest.raises(RecipeError, match=r"^c\.yaml: alone$"):
        problems.fail("alone", location=Location("c.yaml"))


def test_collected_problems_are_bounded() -> None:
    problems, warnings = Problems(), Problems(None)
    with pytest.raises(GossamerError) as caught:
        problems.extend(Problem(f"{index}\n" + "x" * 1000) for index in range(10**6))
    assert len(caught.value.problems) == MAX_PROBLEMS
    assert max(len(line) for line in str(caught.value).splitlines()) == MAX_MESSAGE
    for index in range(1000):
        warnings.add(str(index))
    warnings.raise_if_any()
    assert len(warnings) == MAX_PROBLEMS


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
