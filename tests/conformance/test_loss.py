"""The loss: finite terms per example that reach everything that is trained."""

import torch
from torch.testing import assert_close

import bayesify
from tests.conformance.cases import CLASSES, Case, Example, fitted


def _batch(example: Example, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return example.inputs(rows), torch.arange(rows) % CLASSES


def test_terms_are_finite_and_sum_to_the_total(case: Case, example: Example):
    posterior = fitted(case, example)
    terms = posterior.loss(_batch(example), num_data=100)
    assert terms, "there is no term"
    for name, value in terms.items():
        assert value.ndim == 0, name
        assert value.isfinite(), name
    assert_close(terms.total, torch.stack(list(terms.values())).sum())


def test_terms_are_per_example(case: Case, example: Example):
    posterior = fitted(case, example)
    x, labels = _batch(example)
    with posterior.drawn(posterior.keys(1, seed=0)[0]):
        once = posterior.loss((x, labels), num_data=100)
        twice = posterior.loss((torch.cat([x, x]), torch.cat([labels, labels])), num_data=100)
    assert once.keys() == twice.keys()
    for name in once:
        assert_close(once[name], twice[name], rtol=1e-12, atol=1e-12)


def test_the_loss_does_not_depend_on_how_the_posterior_is_called_upon(case: Case, mlp: Example):
    posterior = fitted(case, mlp)
    x, labels = _batch(mlp)
    with posterior.drawn(posterior.keys(1, seed=0)[0]):
        pair = posterior.loss((x, labels), num_data=100)
        mapped = posterior.loss({"input": x, "labels": labels}, num_data=100)
    assert_close(pair.total, mapped.total)


def test_backward_reaches_everything_that_is_trained(case: Case, example: Example):
    posterior = bayesify.convert(example.network(), case.noisy).train()
    for stage in posterior.method.stages(posterior):
        parameters = [p for group in stage.groups for p in group["params"]]
        assert parameters, stage.name
        # Masks may hide a weight from one pass, never from many.
        with stage.context():
            for _ in range(16):
                posterior.loss(_batch(example), num_data=100).total.backward()
        names = {id(p): name for name, p in posterior.named_parameters()}
        for parameter in parameters:
            assert parameter.grad is not None, names[id(parameter)]
            assert parameter.grad.isfinite().all(), names[id(parameter)]
            assert parameter.grad.any() or _is_redundant(names[id(parameter)]), names[id(parameter)]


def _is_redundant(name: str) -> bool:
    # Batch normalisation takes a bias before it away: its gradient is zero but for rounding.
    return name.endswith("0.bias")


def test_likelihoods_parameters_are_trained(case: Case):
    layers = torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
    network = torch.nn.Sequential(*layers).double()
    posterior = bayesify.convert(network, case.noisy, likelihood=bayesify.Gaussian())
    learned = [p for p in posterior.likelihood.parameters() if p.requires_grad]
    assert learned
    before = [p.detach().clone() for p in learned]
    x = torch.randn(12, 4, dtype=torch.float64)
    bayesify.fit(posterior, [(x, x[:, :1] * 3)] * 3, num_data=12, epochs=1, progress=False)
    assert all(not torch.equal(p, b) for p, b in zip(learned, before, strict=True))
