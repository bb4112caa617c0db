from dataclasses import dataclass
from typing import Literal

import pytest

import bayesify
from bayesify.cli._common import UsageError
from bayesify.cli._settings import make_method, make_methods, parse_arguments, parse_value


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3),
        ("1e-3", float, 1e-3),
        ("3", float | None, 3.0),
        ("None", float | None, None),
        ("3", int | None, 3),
        ("no", bool, False),
        ("cosine", Literal["constant", "cosine"], "cosine"),
        ("2", Literal[1, 2], 2),
        ("none", Literal["a"] | None, None),
        ("[1, 2.5]", tuple[float, ...], (1, 2.5)),
        ("a=b", str, "a=b"),
    ],
)
def test_values_have_the_declared_type(text, hint, value):
    read = parse_value(text, hint, "")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "said"),
    [
        ("3.5", int, "a whole number"),
        ("many", float | None, "a number or none"),
        ("2", bool, "true or false"),
        ("linear", Literal["constant", "cosine"], "'constant' or 'cosine'"),
        ("[1,", tuple[float, ...], "JSON"),
    ],
)
def test_a_wrong_value_says_what_is_expected(text, hint, said):
    with pytest.raises(UsageError, match=f"--set lr={text.replace('[', '.')}.*{said}"):
        parse_value(text, hint, f"lr={text}")


def test_settings_reach_the_method():
    assert make_method("swag", ["rank=4", "lr=0.5"]) == bayesify.SWAG(rank=4, lr=0.5)
    dropout = make_method("mc-dropout", ["p=0.25", "insert_before=linear", "schedule=cosine"])
    assert dropout == bayesify.MCDropout(p=0.25, insert_before="linear", schedule="cosine")


def test_a_setting_is_for_all_methods_that_have_it_or_for_one():
    made = make_methods(["swag", "mc-dropout", "swag"], ["lr=0.5", "rank=4", "swag.epochs=3"])
    assert made == {"swag": bayesify.SWAG(rank=4, lr=0.5, epochs=3), "mc-dropout": bayesify.MCDropout(lr=0.5)}


def test_all_are_all():
    assert list(make_methods(["map", "all"], [])) == list(bayesify.list_methods())


@pytest.mark.parametrize(
    ("names", "pairs", "said"),
    [
        (["swagg"], [], "no method 'swagg'.*deep-ensemble"),
        (["swag"], ["ranks=3"], "no setting 'ranks'; swag has .*rank"),
        (["swag"], ["map.lr=3"], "'map' is none of the methods given, swag"),
        (["swag", "map"], ["map.rank=3"], "no setting 'rank'; map has"),
        (["swag"], ["rank"], "KEY=VALUE"),
        (["swag"], ["rank=1"], "rank=1 has no low-rank"),
    ],
)
def test_wrong_settings_are_explained(names, pairs, said):
    with pytest.raises(UsageError, match=said):
        make_methods(names, pairs)


def test_methods_of_users_have_settings_too(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Mine(bayesify.MAP):
        name = "mine"
        widths: tuple[int, ...] = (1,)

    monkeypatch.setattr("bayesify.cli._settings.list_methods", lambda: {"mine": Mine})
    assert make_method("mine", ["widths=[3, 4]"]).widths == (3, 4)


def test_factory_arguments_are_literals_or_text():
    pairs = ["n=3", "name=resnet", "flag=True", "shape=(1, 2)", "url=a=b"]
    assert parse_arguments(pairs, "--model-arg") == {
        "n": 3,
        "name": "resnet",
        "flag": True,
        "shape": (1, 2),
        "url": "a=b",
    }
