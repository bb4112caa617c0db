import pytest
from torch import nn

from bayesify import Posterior
from tests.conformance.cases import CASES, EXAMPLES, Case, Example, fitted


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


@pytest.fixture
def mlp() -> Example:
    return EXAMPLES["mlp"]


@pytest.fixture
def network(mlp: Example) -> nn.Module:
    return mlp.network()


@pytest.fixture
def posterior(case: Case, mlp: Example) -> Posterior:
    """A fitted, noisy posterior of a network with batch normalisation and two kinds of dropout."""
    return fitted(case, mlp)
