"""One call that tries what a budget allows, and returns the best posterior, ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from bayesify._core.inputs import as_loader
from bayesify.choosing.candidates import Candidate, Choice
from bayesify.choosing.trials import Trials
from bayesify.laws import Posterior
from bayesify.likelihoods import Likelihood, as_likelihood
from bayesify.prediction import Views

__all__ = ["Candidate", "Choice", "choose"]


@torch.inference_mode(False)
def choose(
    network: nn.Module,
    val_loader: Iterable[Any],
    *,
    passes: int = 2,
    loader: Iterable[Any] | None = None,
    epochs: int = 0,
    likelihood: str | Likelihood = "classification",
    views: Sequence[Views | Sequence[Any] | str] | None = None,
    seed: int = 0,
    verbose: bool = True,
) -> Posterior:
    """Try what a budget allows, and return the best posterior, calibrated and ready to predict.

    Tried are the plain network with a temperature; views of images, found by going from one pair of views to the next
    best, and both ways of pooling them; noise around the weights and in front of the last layer, as wide as the
    validation data want it; with training data a Laplace approximation of the last layer; with epochs members trained
    on from the network, and BayesAdapter. What is found on validation data, temperatures, pooling, views and widths, is
    found on every second example and judged by its NLL on the others, both ways. Taken is the best of the cheapest that
    are not worse than the best of all by more than two standard errors of the difference; at equal cost the plain
    network on views before anything random. It is then made ready on all of them.

    Args:
        network: A trained network, which is left untouched.
        val_loader: Batches of (inputs, targets) that were not trained on, in the same order whenever they are read.
        passes: How many plain passes a prediction may cost.
        loader: Training data, for what needs a look at them, or learns.
        epochs: How many plain epochs fitting may cost; 0 trains nothing.
        likelihood: What the outputs mean, as in `convert`.
        views: Sets of views to try, each as in `predict`; None takes reflections and shifts for images (B, C, H, W),
            and none for others.
        seed: Of all that is random.
        verbose: Whether to print the table.

    Returns:
        The posterior: `predict(posterior, inputs)` takes its views, its number of draws, temperatures and pooling.
        `posterior.choice` holds the table.

    Costs about ten plain passes over the validation data for images and four passes or more, and about six predictions
    of 256 to 512 validation examples for each kind of noise, with two of all where it helps on these.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 2)
        >>> network = nn.Linear(2, 2)
        >>> posterior = choose(network, [(x, x.argmax(1))], passes=1, verbose=False)
        >>> [candidate.name for candidate in posterior.choice.candidates]
        ['plain + temperature', 'noise before the last layer, widened']
    """
    if passes < 1 or epochs < 0:
        raise ValueError(f"passes must be at least 1 and epochs at least 0, but they are {passes} and {epochs}.")
    if epochs and loader is None:
        raise ValueError(f"epochs={epochs} needs training data: choose(..., loader=train_loader).")
    batches = as_loader(val_loader, "choose")
    if iter(batches) is batches:
        raise TypeError("choose reads the validation data several times. Give a DataLoader, or a list of batches.")
    trials = Trials(network, batches, passes, as_likelihood(likelihood), seed)
    trials.look(views)
    trials.widen_all()
    if loader is not None:
        trials.learn_all(loader, epochs)
    posterior = trials.best()
    if verbose:
        print(posterior.choice)
    return posterior
