"""Old names work, warn, and say the new one; files that have them load without a warning."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, APD, IBNN, MAP, SGLD, SWAG, BayesAdapter, Laplace, MCDropout, convert, decide
from bayesify._core.files import digest
from bayesify.laws import BankLaw, GaussianMixtureLaw, GeneratorLaw
from bayesify.methods import list_methods
from bayesify.methods.method import method_from_dict

ROOT = Path(__file__).parents[1]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3
LOADER = DataLoader(TensorDataset(X, Y), 4)


def posterior(**options):
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), MCDropout(), **options)


def bank():
    torch.manual_seed(0)
    return bayesify.sample_bank(bayesify.ensemble([nn.Linear(4, 3) for _ in range(4)]), 4)


SHORT = {"steps": 2, "latent": 2, "hidden": (4,), "progress": False}

# What is called under an old name, and under the new one, with the same result.
CALLS = {
    "predict(num_samples)": (
        "num_draws",
        lambda: bayesify.predict(posterior(), X, num_samples=3).probs,
        lambda: bayesify.predict(posterior(), X, num_draws=3).probs,
    ),
    "evaluate(num_samples)": (
        "num_draws",
        lambda: bayesify.evaluate(posterior(), LOADER, num_samples=3).metrics,
        lambda: bayesify.evaluate(posterior(), LOADER, num_draws=3).metrics,
    ),
    "evaluate(foreign)": (
        "ood",
        lambda: bayesify.evaluate(posterior(), LOADER, foreign={"far": 9 * X}).metrics,
        lambda: bayesify.evaluate(posterior(), LOADER, ood={"far": 9 * X}).metrics,
    ),
    "Evaluation.foreign": (
        "Evaluation.ood",
        lambda: list(bayesify.evaluate(posterior(), LOADER, ood={"far": X}).foreign),
        lambda: ["far"],
    ),
    "replace(Evaluation, foreign)": (
        "ood",
        lambda: dataclasses.replace(bayesify.evaluate(posterior(), LOADER, ood={"far": X}), foreign={}).ood,
        dict,
    ),
    "fpr95": (
        "fpr-at-95-ood-recall/far",
        lambda: bayesify.evaluate(posterior(), LOADER, ood={"far": 9 * X}).metrics["fpr95/far"],
        lambda: bayesify.evaluate(posterior(), LOADER, ood={"far": 9 * X}).metrics["fpr-at-95-ood-recall/far"],
    ),
    "check(num_samples)": (
        "num_draws",
        lambda: bayesify.check(posterior(), LOADER, num_samples=8).draws,
        lambda: bayesify.check(posterior(), LOADER, num_draws=8).draws,
    ),
    "calibrate(num_samples)": (
        "num_draws",
        lambda: bayesify.calibrate(posterior(), LOADER, num_samples=3).likelihood.temperature,
        lambda: bayesify.calibrate(posterior(), LOADER, num_draws=3).likelihood.temperature,
    ),
    "fit_variance_scale(num_samples)": (
        "num_draws",
        lambda: bayesify.fit_variance_scale(posterior(), LOADER, num_samples=5),
        lambda: bayesify.fit_variance_scale(posterior(), LOADER, num_draws=5),
    ),
    "input_sensitivity(num_samples)": (
        "num_draws",
        lambda: bayesify.input_sensitivity(posterior(), X, num_samples=3),
        lambda: bayesify.input_sensitivity(posterior(), X, num_draws=3),
    ),
    "sample_bank(num_samples)": (
        "num_draws",
        lambda: bayesify.sample_bank(bank(), num_samples=2).law.samples,
        lambda: bayesify.sample_bank(bank(), num_draws=2).law.samples,
    ),
    "keys(num_samples)": ("num_draws", lambda: posterior().keys(num_samples=2, seed=0), lambda: posterior().keys(2, 0)),
    "default_samples": ("default_draws", lambda: posterior().default_samples, lambda: posterior().default_draws),
    "loss(foreign)": (
        "ood",
        lambda: list(posterior().loss((X, Y), num_data=8, foreign=X)),
        lambda: list(posterior().loss((X, Y), num_data=8, ood=X)),
    ),
    "loss(regulariser)": (
        "regularizer",
        lambda: list(posterior().loss((X, Y), num_data=8, ood=X, regulariser=bayesify.OODRegularizer())),
        lambda: list(posterior().loss((X, Y), num_data=8, ood=X)),
    ),
    "loss(likelihood)": (
        "convert(network, method, likelihood=...)",
        lambda: list(posterior().loss((X, Y), num_data=8, likelihood="classification")),
        lambda: ["nll"],
    ),
    "fit(likelihood)": (
        "convert(network, method, likelihood=...)",
        lambda: len(bayesify.fit(posterior(), LOADER, epochs=1, likelihood="classification", progress=False).epochs),
        lambda: 1,
    ),
    "fit(optimiser)": (
        "optimizer",
        lambda: len(bayesify.fit(posterior(), LOADER, epochs=1, optimiser=torch.optim.Adam, progress=False).epochs),
        lambda: 1,
    ),
    "fit(regulariser)": (
        "regularizer",
        lambda: (
            bayesify.fit(
                posterior(), LOADER, epochs=1, ood_loader=[X], regulariser=bayesify.OODRegularizer(), progress=False
            )
            .epochs[0]
            .terms.keys()
        ),
        lambda: dict.fromkeys(["nll", "uncertainty", "total"]).keys(),
    ),
    "OODRegularizer(num_samples)": (
        "num_draws",
        lambda: bayesify.OODRegularizer(num_samples=3),
        lambda: bayesify.OODRegularizer(num_draws=3),
    ),
    "distill(how)": (
        "algorithm",
        lambda: type(bayesify.distill(bank(), how="pca", **SHORT).law),
        lambda: type(bayesify.distill(bank(), "pca", **SHORT).law),
    ),
    "distill(num_draws)": (
        "num_bn_draws",
        lambda: bayesify.distill(bank(), "pca", num_draws=3, **SHORT).law.config()["num_bn_draws"],
        lambda: 3,
    ),
    "acquire(how)": (
        "acquisition",
        lambda: decide.acquire(bayesify.predict(posterior(), X), 2, how="entropy"),
        lambda: decide.acquire(bayesify.predict(posterior(), X), 2, acquisition="entropy"),
    ),
    "pgd(num_samples)": (
        "num_draws",
        lambda: decide.pgd(posterior(), X.sigmoid(), Y, steps=1, num_samples=2),
        lambda: decide.pgd(posterior(), X.sigmoid(), Y, steps=1, num_draws=2),
    ),
    "Detector.fit(tpr)": (
        "id_acceptance",
        lambda: decide.Detector.fit(range(19), tpr=0.9).threshold,
        lambda: decide.Detector.fit(range(19), id_acceptance=0.9).threshold,
    ),
    "Detector.tpr": ("id_acceptance", lambda: decide.Detector.fit(range(19), id_acceptance=0.9).tpr, lambda: 0.9),
    "Detection.is_foreign": (
        "is_ood",
        lambda: decide.Detector.fit(range(19))([99.0]).is_foreign,
        lambda: torch.tensor([True]),
    ),
    "max_probability": (
        "msp, and confidence for the maximum itself",
        lambda: bayesify.predict(posterior(), X).max_probability,
        lambda: bayesify.predict(posterior(), X).msp,
    ),
    "score(max_probability)": (
        'score("msp")',
        lambda: bayesify.predict(posterior(), X).score("max_probability"),
        lambda: bayesify.predict(posterior(), X).score("msp"),
    ),
    "methods()": ("bayesify.list_methods()", lambda: bayesify.methods(), lambda: bayesify.list_methods()),
    "methods.methods": ("list_methods", lambda: bayesify.methods.methods, lambda: list_methods),
    "laws()": (
        "posterior.components()",
        lambda: len(bayesify.laws(posterior())),
        lambda: len(posterior().components()),
    ),
    "prediction.laws": ("bayesify.laws", lambda: bayesify.prediction.laws, lambda: bayesify.laws),
    "prediction.Law": ("bayesify.laws.Component", lambda: bayesify.prediction.Law, lambda: bayesify.Component),
    "Law": ("Component", lambda: bayesify.Law, lambda: bayesify.Component),
    "UncertaintyRegulariser": (
        "OODRegularizer",
        lambda: bayesify.UncertaintyRegulariser,
        lambda: bayesify.OODRegularizer,
    ),
    "ForeignImages": ("OODImages", lambda: bayesify.data.ForeignImages, lambda: bayesify.data.OODImages),
    "make_optimiser": (
        "MAP.make_optimizer",
        lambda: type(MAP().make_optimiser([{"params": [nn.Parameter(X)]}])),
        lambda: torch.optim.SGD,
    ),
    "posteriors.Posterior": (
        "bayesify.laws",
        lambda: bayesify.posteriors.Posterior,
        lambda: bayesify.Posterior,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_old_name_warns_and_gives_the_same(name):
    new, old_call, new_call = CALLS[name]
    with pytest.warns(DeprecationWarning, match=r"is an old name") as caught:
        found = old_call()
    texts = [str(warning.message) for warning in caught if warning.category is DeprecationWarning]
    assert all(new in text for text in texts), texts
    places = {warning.filename for warning in caught}
    assert places == {dataclasses.__file__ if name.startswith("replace") else __file__}, places
    torch.testing.assert_close(found, new_call()) if isinstance(found, torch.Tensor) else None
    if not isinstance(found, torch.Tensor):
        assert str(found) == str(new_call())


SETTINGS = [
    (MAP, "optimiser", "optimizer", "adam"),
    (SGLD, "num_samples", "samples_per_chain", 7),
    (APD, "num_samples", "samples_per_chain", 7),
    (APD, "num_draws", "num_bn_draws", 7),
    (APD, "how", "algorithm", "wgan"),
    (APD, "optimiser", "optimizer", "adam"),
    (SWAG, "num_draws", "num_bn_draws", 7),
    (Laplace, "samples", "mc_labels", 2),
    (ABNN, "samples", "draws_per_member", 7),
    (IBNN, "samples", "draws_per_component", 7),
    (BayesAdapter, "noise", "estimator", "flipout"),
]


@pytest.mark.parametrize(("cls", "old", "new", "value"), SETTINGS, ids=lambda value: getattr(value, "__name__", None))
def test_an_old_setting_of_a_method(cls, old, new, value):
    more = {"structure": "diagonal"} if cls is Laplace else {}
    expected = cls(**{new: value}, **more)
    with pytest.warns(DeprecationWarning, match=rf"{cls.__name__}\({old}=\.\.\.\).*{cls.__name__}\({new}=\.\.\.\)"):
        assert cls(**{old: value}, **more) == expected
    with pytest.warns(DeprecationWarning, match=rf"{cls.__name__}\.{old} is .*{cls.__name__}\.{new}"):
        assert getattr(expected, old) == value
    with pytest.warns(DeprecationWarning, match=old):
        assert dataclasses.replace(cls(**more), **{old: value}) == expected
    # A file that an older version wrote is read in silence.
    values = expected.to_dict()
    values[old] = values.pop(new)
    assert method_from_dict(values) == expected


def test_every_renamed_setting_exists_under_its_new_name():
    for cls in list_methods().values():
        fields = {field.name for field in dataclasses.fields(cls)}
        assert set(cls.renamed.values()) <= fields, cls
        assert not set(cls.renamed) & fields, cls
    for law in (BankLaw, GeneratorLaw, GaussianMixtureLaw):
        assert set(law.old_settings.values()) <= set(law.settings), law
        assert not set(law.old_settings) & set(law.settings), law


@pytest.mark.parametrize("algorithm", [None, "pca", "mixture"])
def test_old_settings_in_the_file_of_a_law(algorithm, tmp_path):
    made = bank() if algorithm is None else bayesify.distill(bank(), algorithm, components=2, latent=2, progress=False)
    bayesify.save(made, tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    config = json.loads(path.read_text())
    for old, new in made.law.old_settings.items():
        config["method"][old] = config["method"].pop(new)
    config["digest"] = digest({key: value for key, value in config.items() if key != "digest"})
    path.write_text(json.dumps(config))
    loaded = bayesify.load(tmp_path / "saved", made.plain_network())  # in silence
    assert loaded.law.config() == made.law.config()


def test_a_method_that_overrides_an_old_function_is_heard():
    with pytest.warns(DeprecationWarning, match=r"Mine\.make_optimiser is an old name.*Mine\.make_optimizer"):

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Mine(MAP):
            def make_optimiser(self, groups):
                return torch.optim.Adam(groups, lr=0.5)

    assert type(Mine().make_optimizer([{"params": [nn.Parameter(X)]}])) is torch.optim.Adam
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        Mine().nothing  # noqa: B018


def test_two_names_for_one_argument_are_refused():
    with (
        pytest.warns(DeprecationWarning, match="num_draws="),
        pytest.raises(TypeError, match="num_samples and num_draws"),
    ):
        bayesify.predict(posterior(), X, num_samples=2, num_draws=3)


MODULES = {
    "posteriors": ("laws", "Posterior"),
    "predict": ("prediction", "predict"),
    "calibrate": ("prediction.calibration", "calibrate"),
    "export": ("prediction.exporting", "export"),
    "sensitivity": ("prediction.sensitivity", "input_sensitivity"),
    "convert": ("conversion", "Conversion"),
    "fit": ("fitting", "History"),
    "evaluate": ("evaluation.evaluation", "measure_cost"),
    "check": ("evaluation.checking", "Check"),
    "diagnose": ("evaluation.diagnosis", "Diagnosis"),
    "distill": ("methods.distillation", "agreement"),
}


@pytest.mark.parametrize("old", MODULES)
def test_an_old_module_can_be_imported_from(old):
    new, name = MODULES[old]
    with pytest.warns(DeprecationWarning, match=rf"bayesify\.{old} is an old name.*bayesify\.{re.escape(new)}"):
        exec(f"from bayesify.{old} import {name}", found := {})
    assert found[name] is getattr(importlib.import_module(f"bayesify.{new}"), name)
    value = getattr(bayesify, old)
    assert callable(value) == (old not in ("posteriors", "sensitivity"))  # the function is not hidden by the import


@pytest.mark.parametrize("name", ["FeaturePrediction", "ClassificationPrediction", "RegressionPrediction"])
def test_types_of_predictions_where_they_were(name):
    with pytest.warns(DeprecationWarning, match=rf"bayesify\.prediction\.{name} .*bayesify\.likelihoods\.{name}"):
        exec(f"from bayesify.prediction import {name}", found := {})
    assert found[name] is getattr(bayesify, name)


@pytest.mark.parametrize(("name", "place"), [("measure", "measures"), ("report", "report")])
def test_public_modules_keep_their_names(name, place):
    module = importlib.import_module(f"bayesify.{name}")
    target = importlib.import_module(f"bayesify.evaluation.{place}")
    for public in target.__all__:
        assert getattr(module, public) is getattr(target, public) is getattr(getattr(bayesify, name), public)


def test_no_module_is_hidden_by_a_function():
    folder = Path(bayesify.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    for name in modules - {"__init__", "__main__"}:
        importlib.import_module(f"bayesify.{name}")
        assert type(getattr(bayesify, name)).__name__ not in ("function", "type"), name


@pytest.mark.slow
def test_the_package_warns_of_nothing_when_it_is_imported():
    code = "import bayesify, bayesify.data, bayesify.decide, bayesify.cli, bayesify.cli.demo, bayesify.report"
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning:bayesify", "-c", code], check=True)


BANNED = re.compile(r"\bforeign|\bclothes\b|optimiser=|num_samples|max_probability", flags=re.IGNORECASE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_have_the_words_of_the_field(page):
    found = [line for line in page.read_text(encoding="utf-8").splitlines() if BANNED.search(line)]
    assert not found, found


def test_docstrings_have_the_words_of_the_field():
    owners = {name: getattr(bayesify, name) for name in bayesify.__all__}
    owners |= {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (bayesify.data, bayesify.decide, bayesify.measure, bayesify.methods, bayesify.report)
        for name in module.__all__
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        members = {
            f"{name}.{part}": getattr(value, part)
            for name, value in owners.items()
            if isinstance(value, type)
            for part in vars(value)
            if not part.startswith("_") and part not in getattr(value, "renamed", {})
        }
    texts = {name: getattr(value, "__doc__", None) or "" for name, value in {**owners, **members}.items()}
    assert len(texts) > 200
    assert not {name: text for name, text in texts.items() if BANNED.search(text)}
