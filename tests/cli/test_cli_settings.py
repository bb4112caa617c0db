"""A method's settings on the command line: names, types and help are those of its dataclass."""

import dataclasses
import inspect
import re
import types
import typing
from dataclasses import dataclass
from typing import Literal, Union

import pytest

import bayesify
from bayesify.cli._arguments import read_command
from bayesify.cli._output import UsageError
from tests.cli.nets import unboxed

FIT = ("fit", "--model", "m:f", "--data", "digits", "--out", "folder")
COMPARE = ("compare", "--model", "m:f", "--data", "digits")
SETTINGS = [(name, field.name) for name, cls in bayesify.list_methods().items() for field in dataclasses.fields(cls)]
EXAMPLES = {int: (3, 0, -2), float: (0.25, -1e-3), bool: (False, True), str: ("no", "a b"), type(None): (None,)}


def values(hint):
    """Return values of a type: of each of its kinds."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return list(inside)
    if origin in (Union, types.UnionType):
        return [value for kind in inside for value in values(kind)]
    if origin is tuple:
        kinds = inside[:1] * 3 if inside[-1] is Ellipsis else inside
        return [tuple(values(kind)[0] for kind in kinds)]
    return list(EXAMPLES[hint])


def words(option, value):
    if isinstance(value, tuple):
        return [option, *map(str, value)]
    return [f"{option}={value}"]


def made(name, *more):
    return read_command([*FIT, "--method", name, *more]).methods[name]


def set_to(pairs, *names):
    given = [word for name in names for word in ("--method", name)]
    return read_command([*FIT, *given, *(word for pair in pairs for word in ("--set", pair))]).methods


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
@pytest.mark.slow
def test_every_setting_is_an_option_with_the_values_of_its_type(name, setting, capsys):
    """What the method takes is what it gets; what it refuses is refused with its own sentence."""
    cls = bayesify.list_methods()[name]
    tried = values(typing.get_type_hints(cls)[setting])
    taken = 0
    for value in tried:
        given = words(f"--{name}.{setting.replace('_', '-')}", value)
        refused = ""
        try:
            expected = cls(**{setting: value})
        except ValueError as error:
            refused = str(error)
        if refused:
            with pytest.raises(SystemExit, match="2"):
                made(name, *given)
            assert unboxed(refused) in unboxed(capsys.readouterr().err)
            continue
        found = made(name, *given)
        assert found == expected
        assert type(getattr(found, setting)) is type(value) or value is None
        taken += 1
    assert taken > 0


@pytest.mark.parametrize("name", bayesify.list_methods())
def test_help_has_what_the_docstrings_say(name, capsys):
    cls, said = bayesify.list_methods()[name], {}
    for base in reversed(cls.__mro__):
        section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("\nAttributes:\n")[2].partition("\n\n")
        said |= dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section[0], flags=re.M))
    with pytest.raises(SystemExit, match="0"):
        made(name, "--help")
    shown = "".join(unboxed(capsys.readouterr().out).split())
    for field in dataclasses.fields(cls):
        assert f"--{name}.{field.name.replace('_', '-')}" in shown
        assert "".join(said[field.name].split()) in shown, field.name


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("swag", "--swag.rank=many", "--swag.rank: invalid literal for int() with base 10: 'many'"),
        ("swag", "--swag.rank=3.5", "--swag.rank: invalid literal for int() with base 10: '3.5'"),
        ("swag", "--swag.lr=fast", "--swag.lr: could not convert string to float: 'fast'"),
        ("swag", "--swag.schedule=linear", "invalid choice 'linear' for argument '--swag.schedule'. Expected one of"),
        ("swag", "--swag.rank=1", "rank=1 has no low-rank covariance (it divides by rank - 1); use 0, or 2 and more."),
        ("swag", "--swag.rnk=1", "Unrecognized options: --swag.rnk"),
        ("swag", "--swag.rnk=1", "Perhaps you meant: --swag.rank INT"),
        ("swag", "--laplace.seed=1", "Unrecognized options: --laplace.seed"),
        ("sgld", "--sgld.together=perhaps", "invalid choice 'perhaps' for argument '--sgld.together'"),
        ("mc-dropout", "--mc-dropout.p=many", "--mc-dropout.p: no type matching {None}|FLOAT"),
        ("laplace", "--laplace.prior-precision=wide", "{auto,marginal-likelihood,validation}"),
        ("ibnn", "--ibnn.start-std=1", "--ibnn.start-std"),
    ],
)
def test_a_wrong_value_gets_a_sentence(bayesify, name, given, said):
    code, out, error = bayesify(*FIT, "--method", name, given)
    assert (code, out) == (2, "")
    assert said in unboxed(error)
    assert "Traceback" not in error


# -- KEY=VALUE -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pair", "value"),
    [
        ("swag", "rank=3", 3),
        ("swag", "lr=1e-3", 1e-3),
        ("swag", "swag.lr=1e-3", 1e-3),
        ("mc-dropout", "p=None", None),
        ("mc-dropout", "p=null", None),
        ("sgld", "thin=none", None),
        ("sgld", "together=yes", True),
        ("apd", "online=False", False),
        ("apd", "hidden=[3, 4]", (3, 4)),
        ("ibnn", "start_std=[0.1, 0.2]", (0.1, 0.2)),
        ("laplace", "prior_precision=validation", "validation"),
    ],
)
def test_key_and_value_mean_the_option(name, pair, value):
    found = getattr(set_to([pair], name)[name], pair.partition("=")[0].rpartition(".")[2])
    assert found == value
    assert type(found) is type(value)


def test_a_setting_is_for_all_methods_that_have_it_or_for_one():
    made = set_to(["lr=0.5", "rank=4", "swag.epochs=3"], "swag", "mc-dropout", "swag")
    assert made == {"swag": bayesify.SWAG(rank=4, lr=0.5, epochs=3), "mc-dropout": bayesify.MCDropout(lr=0.5)}


def test_all_are_all():
    assert list(read_command([*COMPARE, "--method", "all"]).methods) == list(bayesify.list_methods())


def test_epochs_are_for_the_methods_that_were_asked_for():
    made = read_command([*COMPARE, "--method=swag", "--method", "laplace", "--epochs", "3"]).methods
    assert made == {"map": bayesify.MAP(), "swag": bayesify.SWAG(epochs=3), "laplace": bayesify.Laplace(epochs=3)}
    assert made["laplace"].learns
    assert not made["map"].learns


@pytest.mark.parametrize(
    ("names", "pairs", "said"),
    [
        (["swagg"], [], "no method 'swagg'.*deep-ensemble"),
        (["swag"], ["ranks=3"], "no setting 'ranks'; swag has .*rank"),
        (["swag"], ["map.lr=3"], "'map' is none of the methods given, swag"),
        (["swag", "map"], ["map.rank=3"], "no setting 'rank'; map has"),
        (["swag"], ["rank"], "KEY=VALUE"),
    ],
)
def test_wrong_settings_are_explained(names, pairs, said):
    with pytest.raises(UsageError, match=said):
        set_to(pairs, *names)


def test_a_setting_that_the_method_refuses_is_explained(bayesify):
    code, _, error = bayesify(*FIT, "--method", "swag", "--set", "rank=1")
    assert code == 2
    assert "rank=1 has no low-rank covariance" in unboxed(error)


# -- words that changed, and methods of users ----------------------------------------------------------------------


def test_old_words_still_work_and_name_the_new_ones():
    words = ["evaluate", *FIT[1:5], "--method", "map"]
    with pytest.warns(FutureWarning, match="--num-samples is now called --num-draws"):
        assert read_command([*words, "--num-samples", "3"]).prediction.num_draws == 3
    with pytest.warns(FutureWarning, match="--foreign is now called --ood"):
        assert read_command([*words, "--foreign=mnist", "--foreign", "digits"]).data.ood == ("mnist", "digits")


def test_old_names_of_settings_still_work():
    with pytest.warns(FutureWarning, match="num_draws is now called num_bn_draws"):
        assert set_to(["swag.num_draws=4"], "swag")["swag"].num_bn_draws == 4
    with pytest.warns(FutureWarning, match="optimiser is now called optimizer"):
        assert set_to(["optimiser=adam"], "map")["map"] == bayesify.MAP(optimizer="adam")


def test_methods_of_users_have_settings_too(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Mine(bayesify.MAP):
        name = "my_own-1"
        widths: tuple[int, ...] = (1,)
        label: str = ""

    monkeypatch.setattr("bayesify.cli._arguments.list_methods", lambda: {"my_own-1": Mine})
    assert set_to(["widths=[3, 4]", "label=no"], "my_own-1")["my_own-1"] == Mine(widths=(3, 4), label="no")
    assert made("my_own-1", "--my_own-1.widths", "5", "6").widths == (5, 6)
