"""`re:` patterns: they match what Python's `re` matches, and none of them takes long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import Manager
from gossamer.errors import GossamerError
from gossamer.model.name_patterns import MAX_LENGTH, MAX_STATES, PatternError, matching
from tests.fuzz.harness import attempt

RECIPES = [path for path in (Path(__file__).parent.parent / "data").rglob("*") if path.suffix in (".yaml", ".md")]


def names_of_resnet152() -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in torchvision.models.resnet152().named_parameters()]


RESNET = names_of_resnet152()
OTHERS = [
    "bert.encoder.layer.11.attention.self.query.weight",
    "bert.encoder.layer.1.output.dense.weight",
    "features.3.conv.0.0.weight",
    "model.22.dfl.conv.weight",
    "model.22.cv2.0.0.conv.weight",
    "Groß_é.weight",
    "a\n",
    "a\nb",
]


def expected(pattern: str, names: list[str], *, whole: bool = False) -> list[str]:
    compiled = re.compile(pattern)
    return [name for name in names if (compiled.fullmatch(name) if whole else compiled.match(name))]


def same_as_re(pattern: str, names: list[str]) -> None:
    for whole in (False, True):
        found = matching("re:" + pattern, names, field="params", whole=whole)
        assert found == expected(pattern, names, whole=whole), pattern


def patterns_of_recipes() -> list[str]:
    written = re.compile(r"""(['"])re:(.*?)\1|\bre:([^\s,\]'"]+)""")
    found = {match[2] or match[3] for path in RECIPES for match in written.finditer(path.read_text(encoding="utf-8"))}
    return sorted(pattern for pattern in found if pattern)


def test_patterns_of_real_recipes_match_as_with_re() -> None:
    patterns = patterns_of_recipes()
    assert len(patterns) > 20
    assert any("(?!" in pattern for pattern in patterns)
    for pattern in patterns:
        same_as_re(pattern, RESNET + OTHERS)


@pytest.mark.parametrize(
    "pattern",
    [
        "", ".", ".*", "a|", "|a", "(?:)", "()*", "layer[34]", r"layer\d+\.\d+\.conv[12]\.weight$", "[^l]", "[]a]",
        "[^]l]",
        r"[\w.]+weight", r"layer1\b", r".*\Bght", r"^layer1", r"\Alayer1", r"a\Z", "a$", "a.", "(?s)a.b", "(?i)LAYER1",
        r"(?is)GROSS|GROß", r"(?a)Gro\W", r"Gro\w_", "(?!layer[123]).*weight", "(?=layer)(?!.*bn).*", "(?:layer4|fc).*",
        r".*(?<!bn\d)\.weight", r".*(?<=conv\d)\.weight", "(?<!x)layer", "((?!dfl).)*$", "(?P<stage>layer[12])",
        r"layer1{1}",
        "layer1{", "layer1{,", "layer{,2}1", "l{1,}ayer", "l{0}layer", "(layer){2}", "(?:[a-z]+\\d?\\.)*weight",
        "x*?layer+?1??",
        r"\x6cayer", r"\u006cayer", r"\154ayer", r"\N{LATIN SMALL LETTER L}ayer", r"a\n", r"a\0?", "[[l]ayer",
        "(?:^)*layer",
        "(?=layer)*fc", "((a|b)*|c)*d?", "(.*)*x", "(a*)*$", "(?!)", "(?<=)f", "fc.(?:weight|bias)", r"fc\.(?!bias)",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_a_pattern_matches_as_with_re(pattern: str) -> None:
    names = RESNET[::7] + OTHERS
    if pattern == "(.*)*x":
        names = ["ab", "x", "aax"]
    same_as_re(pattern, names)


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\d", r"\.", r"\b", r"\B", "^", "$", "()"])


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = inner.map("(?:{})".format)
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({'|'.join(options)})"),
        st.tuples(group, st.sampled_from(["?", "*", "+", "{2}", "{1,2}", "*?", "??"])).map("".join),
        inner.map("(?={})".format),
        inner.map("(?!{})".format),
        st.sampled_from("ab").map("(?<={})".format),
        st.sampled_from(["a", "b", r"\w"]).map("(?<!{})".format),
    )


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.recursive(ATOMS, grown, max_leaves=6), st.lists(st.text("ab.1", min_size=1, max_size=5), min_size=1, max_size=8)
)
def test_random_patterns_match_as_with_re(pattern: str, names: list[str]) -> None:
    same_as_re(pattern, names)


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*x", "(a+)+$", "((.*)*)*x", "(.*.*.*.*.*.*.*.*)x", ".*" * 490 + "x", f"(?:{'|'.join('.' * 490)})*x",
        "(.{0,50}){0,50}x", "(?:(?!x)(?!y).)*" * 60 + "x", "(" * 49 + ".*" + ")*" * 49 + "x", "(?:){1000000000}",
        "a{4990}",
        "(?=(?=(?=.*x).*)*.*)*x", f"(?:(?:{'|'.join('.' * 100)})*1(?:{'|'.join('.' * 100)})*2)*x", "(?=.*x)" * 140,
    ],
)  # fmt: skip
def test_no_pattern_takes_long(pattern: str) -> None:
    assert attempt(lambda: matching("re:" + pattern, RESNET, field="params"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(" * 500 + ")" * 500, "more than 50 levels deep"),
        ("(", "is not a regular expression: missing )"),
        ("*", "is not a regular expression: nothing to repeat"),
        ("a{99999999999}", "is not a regular expression: the repetition number is too large"),
        ("x" * (MAX_LENGTH + 1), "has 1,001 characters"),
        (f"a{{{MAX_STATES}}}", "repetitions written out"),
        ("(?:a{100}){100}", "repetitions written out"),
        ("(?=a{900}){900}", "repetitions written out"),
        (r"(a)\1", r"has '\1' at position 3; backreferences"),
        ("(?P<x>a)(?P=x)", "has '(?P' at position 8"),
        ("(a)?(?(1)b|c)", "has '(?(' at position 4"),
        ("(?>a)", "not supported"),
        ("a++", "has '++' at position 1"),
        ("a{2}+", "has '{2}+' at position 1"),
        ("(?#comment)a", "not supported"),
        ("(?x) a", "flags other than a leading (?i), (?s) or (?a) are not supported"),
        ("(?i:a)", "not supported"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_with_the_reason(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=re.escape(message)):
        matching("re:" + pattern, RESNET, field="params")


def test_patterns_of_a_recipe_cannot_hang_modify() -> None:
    recipe = "modifiers: [!ConstantPruningModifier {{params: ['{}']}}]"
    model = torchvision.models.resnet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GossamerError, match="matches none of 62 parameters"):
        Manager(recipe.format("re:(.*)*x")).modify(model, optimizer, steps_per_epoch=1)
    with pytest.raises(GossamerError, match="50 levels deep"):
        Manager(recipe.format("re:" + "(" * 500 + ")" * 500)).modify(model, optimizer, steps_per_epoch=1)
