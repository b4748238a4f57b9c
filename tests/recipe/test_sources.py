"""Where a recipe may come from, and each way in which that can go wrong."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from gossamer.errors import RecipeError
from gossamer.recipe import load, source

RANGE = "modifiers:\n  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RANGE)
    return path


def one_problem(given: object) -> str:
    with pytest.raises(RecipeError) as caught:
        load(given)  # pyright: ignore[reportArgumentType]
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value.problems[0])
    return str(caught.value.problems[0])


def test_a_recipe_comes_from_a_path_a_string_or_an_open_file(file: Path) -> None:
    expected = load(RANGE)
    assert load(file) == load(str(file)) == load(RANGE.encode().decode()) == expected
    with file.open() as text, file.open("rb") as content:
        assert load(text) == load(content) == expected
    assert load(io.StringIO(RANGE)) == load(io.BytesIO(RANGE.encode())) == expected


def test_a_recipe_is_named_as_it_was_given(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert load("recipe.yaml").name == "recipe.yaml"
    assert load(file).name == str(file)
    with open("recipe.yaml") as opened:
        assert load(opened).name == "recipe.yaml"
    assert load(RANGE).name == load(io.StringIO(RANGE)).name == "<recipe>"


@pytest.mark.parametrize(
    ("ending", "before"),
    [
        (".md", ""),
        (".MD", "\n\n"),
        (".markdown", "<!-- licence -->\n"),
        (".md", "<!--\nline\n---\nline\n-->\n\n<!-- two -->\n"),
        (".md", "# Title\n\n"),
        (".md", "\ufeff"),
    ],
)
def test_front_matter_is_read_with_the_line_numbers_of_the_file(tmp_path: Path, before: str, ending: str) -> None:
    path = tmp_path / f"card{ending}"
    path.write_text(f"{before}---  \n{RANGE}  # a --- in a comment\ntext: ' --- '\n--- \n# Body\n\n---\nmodifiers: [\n")
    recipe = load(path)
    assert recipe.max_epochs == 3
    assert recipe.where(0) == f"{path}:{before.count(chr(10)) + 3}"
    assert recipe.variables["text"] == " --- "


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# Title\n\nprose\n", ":1:1: expected YAML front matter"),
        (RANGE, ":1:1: expected YAML front matter"),
        ("", ":1:1: expected YAML front matter"),
        ("<!-- a -->\n---\n" + RANGE, ":2:1: the front matter that starts here is not closed"),
        ("---\n" + RANGE + " ---\n", ":1:1: the front matter that starts here is not closed|not valid YAML"),
        ("---\n---\n", "found nothing"),
        ("---\nprose\n---\n", "found a single value"),
        ("---\nmodifiers: [\n---\n", ":3:1: not valid YAML"),
    ],
)
def test_markdown_without_readable_front_matter_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "card.md"
    path.write_text(text)
    with pytest.raises(RecipeError, match=reason):
        load(path)


@pytest.mark.parametrize("body", ["<!--" * 100_000, "modifiers" * 50_000])
@pytest.mark.parametrize("ending", [".md", ".txt"])
def test_text_after_the_front_matter_is_read_in_linear_time(tmp_path: Path, ending: str, body: str) -> None:
    path = tmp_path / f"recipe{ending}"
    path.write_text(f"<!-- a -->\n---\n{RANGE}---\n{body}")
    start = time.process_time()
    assert load(path).max_epochs == 3
    assert time.process_time() - start < 2


def test_a_missing_file_is_named_with_its_nearest_neighbour(file: Path) -> None:
    wrong = file.with_name("recipes.yaml")
    assert one_problem(wrong) == one_problem(str(wrong)) == f"{wrong}: no such file; nearest: 'recipe.yaml'"
    assert one_problem("nowhere/at/all") == "nowhere/at/all: no such file"
    assert one_problem("a\0b.yaml") == "a\0b.yaml: no such file"
    assert "found a folder" in one_problem(file.parent)


def test_the_zoo_is_closed() -> None:
    message = one_problem("zoo:cv/classification/resnet_v1-50/pytorch/sparseml/imagenet/pruned-moderate")
    assert "SparseZoo is closed" in message
    assert "gossamer recipe list" in message


def test_a_recipe_that_ships_with_the_package_is_found_by_name() -> None:
    recipe = load("builtin:gmp-90")
    assert recipe.modifiers
    assert recipe.where(0).startswith("builtin:gmp-90:")
    assert "nearest: 'gmp-90'" in one_problem("builtin:gmp90")
    assert "no built-in recipe has that name" in one_problem("builtin:../recipes/x")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "expected UTF-8 text"),
        (RANGE.encode("utf-16"), "expected UTF-8 text"),
        ("a: \xe9\n".encode("latin-1"), "expected UTF-8 text"),
        (b"a: \x00\n", "control character U\\+0000"),
        (b"a: \x1b[0m\n", "control character U\\+001B"),
        (b"", "found nothing"),
        (b"\n# only a comment\n", "found nothing"),
    ],
)
def test_bytes_that_are_not_a_text_are_refused(file: Path, content: bytes, reason: str) -> None:
    file.write_bytes(content)
    with pytest.raises(RecipeError, match=reason):
        load(file)
    with pytest.raises(RecipeError, match=reason):
        load(io.BytesIO(content))


def test_a_recipe_that_is_too_large_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_BYTES", 100)
    text = RANGE + "#" * 100
    file.write_text(text)
    for given in (file, text, io.StringIO(text), io.BytesIO(text.encode())):
        assert "expected a recipe of at most" in one_problem(given)


def test_streams_that_do_not_work_are_refused(file: Path) -> None:
    closed = io.StringIO(RANGE)
    closed.close()
    assert "cannot be read" in one_problem(closed)
    file.write_bytes(b"\xff")
    with file.open(encoding="utf-8") as opened:
        assert "expected UTF-8 text" in one_problem(opened)

    class NoText:
        def read(self, _: int) -> int:
            return 3

    assert "expected text or bytes from the open file, found int" in one_problem(NoText())
    assert "found int" in one_problem(3)
    assert "found NoneType" in one_problem(None)
