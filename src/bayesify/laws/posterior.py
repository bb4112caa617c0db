"""The posterior: a Bayesian network as an ordinary module, and what it learns from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.deprecation import renamed, warn_renamed
from bayesify._core.inputs import in_network_type
from bayesify._core.labels import Convention, beside_outputs, convention_of
from bayesify._core.trees import split_batch
from bayesify.laws.law import Law
from bayesify.laws.modal_network import Draw, ModalNetwork
from bayesify.laws.passes import Refusal, ShapeError
from bayesify.laws.tensors import tensor_of
from bayesify.likelihoods import Likelihood, as_likelihood
from bayesify.likelihoods.naming import is_called

if TYPE_CHECKING:
    from bayesify.choosing import Choice
    from bayesify.methods import Method, OODRegularizer
    from bayesify.prediction import Views
    from bayesify.prediction.widening import Widening
    from bayesify.selection import Conversion

__all__ = ["Draw", "LossTerms", "Posterior", "ShapeError", "require_posterior", "warn_unless_learned"]


_UNFINISHED = (
    "A training loop began with bayesify.Objective and was not finished, and this method learns from more than a loss, "
    "or has its weights in parts (fully_shard). "
    "Make learner = bayesify.Learner(objective, epochs=..., steps_per_epoch=len(loader)) and optimizer = "
    "learner.optimizer() before the loop, call learner.after_step() after each step, and learner.finish(loader) at its "
    "end."
)


class LossTerms(dict[str, Tensor]):
    """The terms of a loss by name, each in mean nats per example.

    >>> LossTerms(nll=torch.tensor(1.0), kl=torch.tensor(0.5)).total
    tensor(1.5000)
    """

    @property
    def total(self) -> Tensor:
        """Return the sum of the terms: what is minimised."""
        terms = list(self.values())
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


class Posterior(ModalNetwork):
    """A distribution over functions: a network, the law of what is random in it, and a likelihood.

    Its parameters and buffers are its whole state. `posterior(x)` is one stochastic pass, with independent noise
    for each example where the law has such; `posterior.draw(seed)` is one coherent function;
    `with posterior.mean():` has no noise. `train()` and `eval()` reach the network's own layers (batch
    normalisation, dropout that was not converted) and never change whether the posterior is random.

    Args:
        network: A copy of the user's network.
        law: What is random in it.
        method: How it is learned; None for laws that are made, not learned.
        likelihood: What the network's outputs mean.

    Attributes:
        conversion: What was converted, what was not, and why.
        output_key: Which entry of a structured output holds the logits or means; None finds it.
        statistics: Batch-normalisation statistics of drawn weights, for laws and networks that have such.
        views: What of the inputs predictions see, see `predict`; None for the inputs as they are.
        learning: What only learning needs (chains, a critic); no part of what `save` writes.
        widening: What `widen` tried and chose, if it was called; no part of what `save` writes.
        choice: What `choose` tried and chose, likewise.

    Example:
        >>> from bayesify.laws import GaussianLaw
        >>> network = nn.Linear(2, 1, bias=False)
        >>> posterior = Posterior(network, GaussianLaw(network, log_stds={"weight": torch.zeros(1, 2)}))
        >>> x = torch.eye(2)
        >>> torch.equal(posterior.draw(3)(x), posterior.draw(3)(x))
        True
    """

    unfinished: bool = False  # whether a loop has begun that must do more than follow a loss, and has not ended

    def __init__(
        self,
        network: nn.Module,
        law: Law,
        *,
        method: Method | None = None,
        likelihood: str | Likelihood = "classification",
    ) -> None:
        super().__init__(network, law)
        self.method = method
        self.register_module("learning", None)
        self.likelihood: Likelihood = as_likelihood(likelihood)
        law.condition(self.likelihood)
        self.conversion: Conversion | None = None
        self.views: Views | None = None
        self.widening: Widening | None = None
        self.choice: Choice | None = None
        self.origin: dict[str, str] = {}
        self.frozen: list[str] = []
        self._convention: Convention | None = None
        self._asked = False  # whether somebody has looked at `learned`

    def __getattr__(self, name: str) -> Any:
        """Find what belongs to the law, as long as code still looks for it here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            law = self.__dict__.get("_modules", {}).get("law")
            if law is None or name.startswith("_") or not hasattr(law, name):
                raise
            warnings.warn(
                f"posterior.{name} belongs to the law: posterior.law.{name}.", DeprecationWarning, stacklevel=2
            )
            return getattr(law, name)

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into inputs and targets, each target beside the output that predicts it.

        Floating-point inputs are converted to the network's type, where it has one. Targets stay where they stand in
        the batch, except for causal language models of transformers: their `labels` are the tokens themselves, and the
        output at a token predicts the next one.

        Args:
            batch: `(inputs, targets)`, or a mapping with a target key.

        Returns:
            The inputs and the targets that `loss`, `evaluate` and `calibrate` compare the outputs with.
        """
        inputs, targets = split_batch(batch)
        if self._convention is None:
            self._convention = convention_of(self.network)
        targets = beside_outputs(self._convention, batch, inputs, targets, self.likelihood.ignore_index)
        return in_network_type(inputs, self.network), targets

    @property
    def learned(self) -> Literal[True] | Refusal:
        """True, or a sentence: why nothing is random yet, and what to call.

        Posteriors that are random as they are made (MC dropout, BayesAdapter) have nothing to wait for.
        """
        return Refusal(_UNFINISHED) if self.unfinished else self.law.learned

    def refresh_statistics(
        self,
        loader: Iterable[Any],
        *,
        max_batches: int | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        """Re-estimate the batch-normalisation statistics of drawn weights, of the mean and of each draw that has some.

        Costs a pass over the loader for each. Does nothing where the law or the network has no use for it.

        Args:
            loader: Training batches.
            max_batches: How many of them; None takes all.
            progress: Wraps the rows that are worked on.
        """
        if self.statistics is not None:
            rows = progress(self.law.rows_to_refresh())
            self.statistics.refresh(self.network, self.law.row_weights, loader, rows, max_batches=max_batches)

    @renamed(foreign="ood", regulariser="regularizer")
    def loss(
        self,
        batch: Any,
        *,
        num_data: int,
        ood: Any = None,
        regularizer: OODRegularizer | None = None,
        likelihood: str | Likelihood | None = None,
    ) -> LossTerms:
        """Return the loss of a batch, term by term, in mean nats per example.

        Args:
            batch: `(inputs, targets)`, or a mapping with a target key.
            num_data: The size n of the training set; terms that belong to the whole set are divided by it.
            ood: OOD inputs, without targets, on which the posterior is to be uncertain.
            regularizer: How that is asked for; None takes `OODRegularizer()`.
            likelihood: An old way to say what the outputs mean; `convert` takes it.

        Returns:
            The terms by name, with their sum as `.total`.
        """
        if num_data < 1:
            raise ValueError(f"num_data is the number of training examples, but it is {num_data}.")
        method = self.require_method()
        if likelihood is not None:
            self.set_likelihood(likelihood)
            warn_renamed("likelihood= of loss", "convert(network, method, likelihood=...)", stacklevel=4)
        self.shared.own(self.network)
        inputs, targets = self.split_batch(batch)
        self.runtime.modes_learned = False  # what was looked at before with gradients on is not what is trained
        if ood is None:
            return method.objective(self, inputs, targets, num_data)
        return (regularizer or method.regularizer()).objective(self, inputs, targets, ood, num_data)

    def require_method(self) -> Method:
        """Return the method, or say why there is none."""
        if self.method is None:
            raise ValueError(
                f"{self.law.described()} is made from another posterior, not trained. Fit that one and make this anew: "
                "bayesify.sample_bank(posterior, n), bayesify.distill(bank)."
            )
        return self.method

    def set_likelihood(self, likelihood: str | Likelihood) -> None:
        """Say what the outputs mean; a likelihood with parameters must be set before the optimizer is made."""
        named = isinstance(likelihood, str) and is_called(self.likelihood, likelihood)
        resolved = self.likelihood if named else as_likelihood(likelihood)  # with what it has learned
        reference = next(iter(self.network.parameters()), None)
        if reference is not None:
            resolved = resolved.to(reference.device, torch.float64 if reference.dtype == torch.float64 else None)
        self.likelihood = resolved
        self.law.condition(resolved)

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors whose shape only learning decides the shape that they have in a state that will be loaded."""
        self.law.make_room({n.removeprefix("law."): t for n, t in tensors.items() if n.startswith("law.")})
        learning = any(name.startswith("learning.") for name in tensors)
        if not learning:
            self.learning = None
        elif self.learning is None and self.method is not None:
            self.learning = self.method.state(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.make_room({name.removeprefix(prefix): value for name, value in state_dict.items()})
        given = {name: state_dict.get(f"{prefix}network.{name}") for name in self.shared.names}
        self.shared.own(self.network, [n for n, t in given.items() if t is not None and self._differs(n, t)])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _differs(self, name: str, tensor: Tensor) -> bool:
        own = tensor_of(self.network, name)
        if own.data_ptr() == tensor.data_ptr():
            return False
        return own.shape != tensor.shape or not torch.equal(own, tensor.to(own.device, own.dtype))

    def require_unchanged(self) -> None:
        """Raise if somebody has written to the memory that this posterior shares with the network it was made of."""
        if changed := self.shared.changed(self.network):
            raise ValueError(
                f"The network that this posterior was made of was changed in place, as by training or by merging an "
                f"adapter, and the posterior shares its frozen {changed[0]!r} and {len(changed) - 1} more. Make the "
                "posterior anew; convert(network, method, share=False) copies what would be shared."
            )

    def extra_repr(self) -> str:
        """Show the method."""
        return f"method={self.method}"


def require_posterior(value: object) -> None:
    """Raise, and say what to do, if somebody gives a plain network."""
    if not isinstance(value, Posterior):
        raise TypeError(
            f"This needs a posterior, but got a {type(value).__name__}. Make one of your network first: "
            "posterior = bayesify.convert(network, method)."
        )


def warn_unless_learned(posterior: Posterior, *, stacklevel: int = 3) -> None:
    """Raise inside of a loop that has not ended; warn, once for each posterior, if it is not random yet.

    A posterior whose network was changed behind its back raises too.
    """
    posterior.require_unchanged()
    if posterior.unfinished:
        raise ValueError(posterior.learned)
    if posterior._asked:
        return
    posterior._asked = True
    reason = posterior.learned
    if reason is not True:
        warnings.warn(f"This posterior has no uncertainty yet: {reason}", stacklevel=stacklevel)
