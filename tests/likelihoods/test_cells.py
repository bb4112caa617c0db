"""What the page of likelihoods says works with what is what happens."""

import pytest

from tests.likelihoods.cells import LIKELIHOODS, METHODS, STEPS, TABLES, documented
from tests.marks import slow_but, slow_product


def test_every_cell_is_on_the_page():
    for table, (columns, _) in TABLES.items():
        assert {key for key in documented(table) if key[1]} == {
            (name, column) for name in LIKELIHOODS for column in columns
        }


@pytest.mark.parametrize(("likelihood", "method"), slow_product(LIKELIHOODS, METHODS))
def test_methods_and_predictors(likelihood, method):
    assert TABLES["methods"][1](likelihood, method) == documented("methods")[likelihood, method]


@pytest.mark.parametrize("step", slow_but(["save and load", "calibrate"], STEPS))
@pytest.mark.parametrize("likelihood", slow_but(["Ordinal", "Poisson", "StudentT"], LIKELIHOODS))
def test_steps_after(likelihood, step):
    assert TABLES["steps"][1](likelihood, step) == documented("steps")[likelihood, step]
