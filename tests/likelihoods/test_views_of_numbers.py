"""Views, parts of mixtures and pooling, for likelihoods of one number or score."""

import pytest
import torch
from torch.testing import assert_close

from bayesify import NegativeBinomial, Ordinal, Poisson, StudentT

F64 = torch.float64


def widened():
    likelihood = StudentT(4.0, scale=0.5).double()
    likelihood.variance_scale.fill_(3.0)
    return likelihood


MADE = {"student": widened, "poisson": Poisson, "negative binomial": lambda: NegativeBinomial(0.3)}


@pytest.mark.parametrize("name", MADE)
def test_what_views_disagree_about_is_a_part_of_the_variance(name):
    likelihood, outputs = MADE[name]().double(), torch.randn(6, 4, 1, dtype=F64)
    stream = likelihood.stream()
    stream.add(outputs[:4], view=0)
    stream.add(outputs[4:], view=1)
    found = stream.result()
    means = outputs[..., 0] if name == "student" else outputs[..., 0].exp()
    centre = means.mean(0)
    between = (4 * (means[:4].mean(0) - centre) ** 2 + 2 * (means[4:].mean(0) - centre) ** 2) / 6
    assert_close(found.view_epistemic, between * (3 if name == "student" else 1), rtol=1e-10, atol=1e-15)
    assert likelihood.from_samples(outputs).view_epistemic is None


@pytest.mark.parametrize("name", MADE)
def test_a_mixture_of_parts_is_that_of_all_draws(name):
    likelihood, outputs = MADE[name]().double(), torch.randn(6, 4, 1, dtype=F64)
    parts = [likelihood.from_samples(outputs[:2]), likelihood.from_samples(outputs[2:])]
    found, wanted = likelihood.mixture(parts, [1 / 3, 2 / 3]), likelihood.from_samples(outputs)
    assert type(found) is type(wanted)
    for field in ("mean", "aleatoric", "epistemic"):
        assert_close(getattr(found, field), getattr(wanted, field), rtol=1e-10, atol=1e-15, msg=field)
    assert likelihood.mixture(parts[:1], [1.0]) is parts[0]
    seen = likelihood.mixture(parts, [1 / 3, 2 / 3], views=True)
    stream = likelihood.stream()
    stream.add(outputs[:2], view=0)
    stream.add(outputs[2:], view=1)
    assert_close(seen.view_epistemic, stream.result().view_epistemic, rtol=1e-10, atol=1e-15)


def test_views_of_an_ordered_class():
    likelihood, scores = Ordinal(4).double(), torch.randn(6, 3, 1, dtype=F64)
    stream = likelihood.stream()
    stream.add(scores[:3], view=0)
    stream.add(scores[3:], view=1)
    found = stream.result()
    within = (likelihood.from_samples(scores[:3]).total + likelihood.from_samples(scores[3:]).total) / 2
    assert_close(found.view_epistemic, found.total - within, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("likelihood", [Ordinal(3), Poisson(), StudentT()], ids=str)
@pytest.mark.parametrize("asked", [{"pooling": "log-probs"}, {"pooling": 0.5}, {"temperatures": "each"}], ids=str)
def test_there_is_one_average_of_draws(likelihood, asked):
    with pytest.raises(ValueError, match=r"are for logits of classes: .* Leave both as they are"):
        likelihood.calibrate([(torch.zeros(2, 4, 1), torch.zeros(4).long())], **asked)
