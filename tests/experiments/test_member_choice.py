"""Which members are put beside the network, judged on validation images."""

import torch

from bayesify.likelihoods.pooling_fit import Pooled, fit_pooled, folds_of
from experiments.member_choice import Candidate, affordable, judged


def candidate(name, epochs, members, generator):
    """Return a candidate that is right more often than not, on two to four views of 60 examples."""
    labels = torch.arange(60) % 3
    seen = {}
    for views in (2, 3, 4):
        noise = torch.randn(members, views, 60, 3, generator=generator)
        seen[views] = noise + 2 * torch.nn.functional.one_hot(labels, 3)
    return Candidate(name, epochs, seen), labels


def test_an_ensemble_is_judged_by_the_temperatures_of_other_examples():
    generator = torch.Generator().manual_seed(0)
    one, labels = candidate("one", 0, 1, generator)
    two, _ = candidate("two", 10, 2, generator)
    logits = torch.stack([*one.outputs[2][0], *two.outputs[2][0], *two.outputs[2][1]])
    parts, (folds, number) = [0, 0, 1, 1, 2, 2], folds_of(torch.arange(60))
    total = 0.0
    for fold in range(number):
        mine = folds == fold
        found, _, _ = fit_pooled(
            logits[:, ~mine], labels[~mine], start=Pooled(torch.ones(()), 0.0), parts=parts, pooling="log-probs",
            temperatures="each",
        )  # fmt: skip
        for row in mine.nonzero()[:, 0].tolist():
            tempered = [logits[draw, row].double() / found.temperature[part] for draw, part in enumerate(parts)]
            pooled = torch.stack([each.log_softmax(0) for each in tempered]).mean(0)
            total -= float(pooled.log_softmax(0)[labels[row]])
    assert abs(judged([one, two], 2, labels) - total / 60) < 1e-5


def test_epochs_and_passes_are_limited():
    generator = torch.Generator().manual_seed(0)
    network, _ = candidate("network", 0, 1, generator)
    cheap, _ = candidate("cheap", 10, 3, generator)
    dear, _ = candidate("dear", 35, 1, generator)
    found = [("+".join(one.name for one in members), views) for members, views in affordable([network, cheap, dear])]
    # Four members see three views at most, and 45 epochs are too many.
    assert found == [
        *(("network", views) for views in (2, 3, 4)),
        *(("network+cheap", views) for views in (2, 3)),
        *(("network+dear", views) for views in (2, 3, 4)),
    ]
