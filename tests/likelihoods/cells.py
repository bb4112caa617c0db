"""What works with what: every likelihood with every method, predictor and step after, tried on a small network.

`python -m tests.likelihoods.cells` tries all of it and writes the tables of `docs/likelihoods.md` anew.
"""

import copy
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify
from bayesify import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    Likelihood,
    Method,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Posterior,
    StudentT,
)
from tests.conformance.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "likelihoods.md"
METHODS: dict[str, Method] = {type(case.noisy).__name__: case.noisy for case in CASES if not case.variant}
PREDICTORS = ("sampling", "streamlined", "linearised", "mean")
ROWS = 12

# Name: how it is made, the network's outputs, and targets.
LIKELIHOODS: dict[str, tuple[Callable[[], Likelihood], int, Callable[[Tensor], Tensor]]] = {
    "Categorical": (Categorical, 3, lambda x: x.argmax(1)),
    "Bernoulli": (Bernoulli, 1, lambda x: (x[:, 0] > 0).float()),
    "Bernoulli, multi-label": (Bernoulli, 3, lambda x: (x > 0).float()),
    "Ordinal": (lambda: Ordinal(4), 1, lambda x: (x.sum(1) + 1.5).clamp(0, 3).long()),
    "Gaussian": (Gaussian, 1, lambda x: x.sum(1)),
    'Gaussian("head")': (lambda: Gaussian("head"), 2, lambda x: x.sum(1)),
    "StudentT": (StudentT, 1, lambda x: x.sum(1)),
    "Poisson": (Poisson, 1, lambda x: x[:, 0].exp().floor()),
    "NegativeBinomial": (NegativeBinomial, 1, lambda x: x[:, 0].exp().floor()),
    "Custom": (lambda: Custom(lambda o, y: -(o[:, 0] - y).square()), 1, lambda x: x.sum(1)),
}


def data(likelihood: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return x, LIKELIHOODS[likelihood][2](x)


def fitted(likelihood: str, method: Method) -> Posterior:
    """Return a posterior after a short fit."""
    make, outputs, _ = LIKELIHOODS[likelihood]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, outputs))
    made, (x, y) = make(), data(likelihood)
    if made.at_start():
        made.learn(network.eval()(x), y)  # for methods that do not learn it
    posterior = bayesify.convert(network, copy.deepcopy(method), likelihood=made)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
    bayesify.fit(posterior, loader, epochs=method.epochs and min(method.epochs, 3), progress=False)
    return posterior


def tried(step: Callable[[], Any]) -> str:
    """Return "yes", or the sentence of a refusal."""
    try:
        step()
    except (ValueError, TypeError) as error:
        return str(error)
    return "yes"


def predictors_of(likelihood: str, method: str) -> dict[str, str]:
    """Return for each predictor whether it gives a finite prediction after a fit, or what the refusal says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = fitted(likelihood, METHODS[method])
        x, y = data(likelihood)

        def step(how: str) -> None:
            prediction = bayesify.predict(posterior, x, how=how)
            assert prediction.log_prob(y).isfinite().all() or likelihood == "Custom"
            assert prediction.epistemic.isfinite().all()

        return {how: tried(lambda: step(how)) for how in PREDICTORS}  # noqa: B023


def _calibrated(posterior: Posterior, x: Tensor, y: Tensor) -> None:
    before = -bayesify.predict(posterior, x).log_prob(y).mean()
    bayesify.calibrate(posterior, [(x, y)])
    after = -bayesify.predict(posterior, x).log_prob(y).mean()
    assert after <= before + 1e-4, "calibration is never worse on its own data"


def _saved(posterior: Posterior, x: Tensor, y: Tensor) -> None:
    del y
    network = copy.deepcopy(posterior.network)
    with tempfile.TemporaryDirectory() as folder:
        bayesify.save(posterior, Path(folder) / "posterior")
        loaded = bayesify.load(Path(folder) / "posterior", network)
    assert torch.equal(bayesify.predict(loaded, x).score(), bayesify.predict(posterior, x).score())


def _exported(posterior: Posterior, x: Tensor, y: Tensor) -> None:
    del y
    program = bayesify.export(posterior, x).module()
    wanted = bayesify.predict(posterior, x[:5], how="streamlined")
    for name, tensor in program(x[:5]).items():
        torch.testing.assert_close(tensor, getattr(wanted, name), rtol=1e-4, atol=1e-5, check_stride=False)


def _evaluated(posterior: Posterior, x: Tensor, y: Tensor) -> None:
    found = bayesify.evaluate(posterior, [(x, y)]).metrics
    assert all(value == value for value in found.values()), found


STEPS: dict[str, Callable[[Posterior, Tensor, Tensor], None]] = {
    "calibrate": _calibrated,
    "save and load": _saved,
    "export": _exported,
    "evaluate": _evaluated,
}


def step_after(likelihood: str, step: str) -> str:
    """Return whether a step works with a posterior of Gaussian weights, or what the refusal says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tried(lambda: STEPS[step](fitted(likelihood, METHODS["BayesAdapter"]), *data(likelihood)))


# -- tables -----------------------------------------------------------------------------------------------------------


def cell_of(found: dict[str, str]) -> str:
    """Return the letters of the predictors that work, `d s l m`, and a dash for the others."""
    return " ".join({"sampling": "d"}.get(how, how[0]) if found[how] == "yes" else "\N{EN DASH}" for how in PREDICTORS)


def short(found: str) -> str:
    """Return yes, or the first sentence of a refusal."""
    return found if found == "yes" else found.partition(". ")[0].rstrip(".") + "."


def markdown(columns: list[str], cell: Callable[[str, str], str]) -> str:
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[f"`{name}`", *(cell(name, column) for column in columns)] for name in LIKELIHOODS]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, tuple[list[str], Callable[[str, str], str]]] = {
    "methods": (list(METHODS), lambda name, method: cell_of(predictors_of(name, method))),
    "steps": (list(STEPS), lambda name, step: short(step_after(name, step))),
}
MARKED = r"(<!-- tried: {} -->\n)(.*?)(\n<!-- /tried -->)"


def documented(table: str) -> dict[tuple[str, str], str]:
    """Return the cells of a table of the page, by row and column."""
    found = re.search(MARKED.format(table), PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"{PAGE.name} has no table {table!r}"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[2].splitlines()]
    return {(row[0].strip("`"), column): cell for row in lines[2:] for column, cell in zip(lines[0], row, strict=True)}


def main() -> None:
    """Write the tables anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, (columns, cell) in TABLES.items():
        made = markdown(columns, cell)
        text = re.sub(MARKED.format(name), lambda old: old[1] + made + old[3], text, flags=re.DOTALL)  # noqa: B023
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
