"""The posterior: a Bayesian network as an ordinary module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.inputs import in_network_type
from bayesify._core.labels import Convention, beside_outputs, convention_of
from bayesify._core.seen import InputsSeen
from bayesify._core.trees import batch_rows, call, repeat_rows, split_batch
from bayesify.laws.batch_dims import learn_batch_dims
from bayesify.laws.noise import Key, Noise, ShapeError
from bayesify.laws.norm_statistics import statistics_apart, tracking_norms
from bayesify.laws.recomputation import without_guards
from bayesify.laws.swap import find_slots, swapped
from bayesify.likelihoods import Likelihood, as_likelihood
from bayesify.likelihoods.prediction import Prediction

if TYPE_CHECKING:
    from bayesify.conversion import Conversion
    from bayesify.methods import Method, UncertaintyRegulariser

__all__ = ["Draw", "LossTerms", "Posterior", "ShapeError", "require_posterior", "warn_unless_learned"]


class LossTerms(dict[str, Tensor]):
    """The terms of a loss by name, each in mean nats per example.

    >>> LossTerms(nll=torch.tensor(1.0), kl=torch.tensor(0.5)).total
    tensor(1.5000)
    """

    @property
    def total(self) -> Tensor:
        """Return the sum of the terms: what is minimised."""
        return torch.stack(list(self.values())).sum()


class Posterior(nn.Module):
    """A distribution over functions, made from a network.

    Its parameters and buffers are its whole state. `posterior(x)` is one stochastic pass, with independent noise
    for each example where the posterior has such; `posterior.draw(seed)` is one coherent function;
    `with posterior.mean():` has no noise. `train()` and `eval()` reach the network's own layers (batch
    normalisation, dropout that was not converted) and never change whether the posterior is random.

    Attributes:
        network: The converted copy of the user's network.
        method: How the posterior was built and is learned.
        likelihood: What the network's outputs mean.
        conversion: What was converted, what was not, and why.
        output_key: Which entry of a structured output holds the logits or means; None finds it.
        default_samples: How many draws a prediction takes if the caller does not say.
    """

    def __init__(self, network: nn.Module, method: Method) -> None:
        super().__init__()
        if not isinstance(network, Posterior):
            without_guards(network)  # of a posterior that it was copied from
        self.network = network
        self.method = method
        self.likelihood: Likelihood = as_likelihood("classification")
        self.conversion: Conversion | None = None
        self.output_key: str | int | None = None
        self.default_samples = 20
        self.origin: dict[str, str] = {}
        self.frozen: list[str] = []
        self.inputs_seen = InputsSeen()
        self._convention: Convention | None = None
        self._asked = False  # whether somebody has looked at `learned`
        self.noise = Noise()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Leave behind what belongs to the posterior that this one is a copy of."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        without_guards(self.network)

    # -- passes ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one pass in the present mode; arguments and outputs are the network's own."""
        rows = _rows(args, kwargs)
        if not rows:  # nothing in it is random, and it does not show where the batch is
            with self.noise.lock, self.noise.mode(silent=True):
                return self._run(args, kwargs)
        with self.noise.lock, self._learning(args, kwargs), self.noise.one_pass(rows):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensors = self.tensors()
        guard, foreign = self.noise.guard, self.noise.foreign
        if tensors:
            guard.watch((id(self), "tensors"), self.sites)
        if foreign:
            guard.watch((id(self), "norms"), lambda: tracking_norms(self.network).values())
        with guard.at_rest(), statistics_apart(self.network, foreign, self.noise.rows):
            if not tensors:
                return self.network(*args, **kwargs)
            if self.noise.slots.keys() != tensors.keys():
                self.noise.slots = find_slots(self.network, tensors)
            with swapped(self.noise.slots, tensors):
                return self.network(*args, **kwargs)

    @contextmanager
    def _learning(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Learn from a first pass how the network uses its inputs; nothing if it fails, as malformed inputs make it."""
        known, plan = self.noise.batch_dims, self.__dict__.get("_plan")
        try:
            self._learn_batch_dims(args, kwargs)
            yield
        except BaseException:
            self.noise.batch_dims = known
            if plan is None and "_plan" in self.__dict__:
                self.__dict__["_plan"] = None
            raise
        self.inputs_seen.note(args, kwargs)

    def _learn_batch_dims(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        noise = self.noise
        if noise.keys and noise.batch_dims is None and not noise.in_pass:
            learn_batch_dims(self.network, noise, lambda inputs: self._run(*inputs), (args, dict(kwargs)))

    def tensors(self) -> dict[str, Tensor]:
        """Return the network's tensors that are random, by name, for the present mode.

        Empty for posteriors whose noise is in their layers.
        """
        return {}

    def drawn_tensors(self, key: Key) -> dict[str, Tensor]:
        """Return what a draw puts in place of the tensors of `plain_network`, by name."""
        with self.noise.lock, self.noise.mode(keys=(key,)):
            return self.tensors()

    def plain_network(self) -> nn.Module | None:
        """Return a copy of the network that is a draw with the draw's tensors in it; None where noise is in layers."""
        inside = any(isinstance(getattr(module, "noise", None), Noise) for module in self.network.modules())
        return None if inside else without_guards(copy.deepcopy(self.network))

    def outputs(self, inputs: Any) -> Tensor:
        """Run one pass on inputs of any structure and return the tensor of logits or means."""
        return self.read(call(self, in_network_type(inputs, self.network)))

    def evaluate(
        self,
        inputs: Any,
        keys: Sequence[Key],
        *,
        tiled: bool = False,
    ) -> Tensor:
        """Evaluate one or several draws on the same inputs.

        Args:
            inputs: B examples.
            keys: The draws; more than one only where the posterior `folds`.
            tiled: Repeat the inputs before the pass instead of at the first noise, which networks need that
                join activations from before and after it.

        Returns:
            Outputs (S, B, ...).
        """
        inputs = in_network_type(inputs, self.network)
        rows = batch_rows(inputs)
        noise = self.noise
        args, kwargs = call(lambda *args, **kwargs: (args, kwargs), inputs)
        with noise.lock, noise.mode(keys=tuple(keys)), self._learning(args, kwargs):
            if tiled:
                args, kwargs = repeat_rows((args, kwargs), len(keys))
            with noise.one_pass(rows, folded=tiled):
                output = self.read(self._run(args, kwargs))
        draws = len(keys)
        if output.shape[0] != draws * rows:
            raise ShapeError(
                f"The network returned {output.shape[0]} rows for {draws} draws of {rows} examples. Its first output "
                "dimension must be the batch."
            )
        return output.reshape(draws, rows, *output.shape[1:])

    def output_gaussian(self, inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return mean, and variance or covariance, of outputs that are Gaussian themselves, where they are."""
        del inputs
        raise ValueError(
            f"The posterior of {self.method.name!r} has no prediction in closed form; that of "
            "Laplace(structure='last-layer') has. Use how='sampling'."
        )

    def closed_form(self, inputs: Any, *, num_samples: int | None = None, seed: int = 0) -> Prediction:
        """Return the prediction in closed form, in one pass, where the posterior has one.

        Args:
            inputs: B examples.
            num_samples: As in `Likelihood.from_gaussian`.
            seed: Of these draws.
        """
        mean, variance, covariance = self.output_gaussian(inputs)
        return self.likelihood.from_gaussian(mean, variance, covariance=covariance, num_samples=num_samples, seed=seed)

    def reference(self, inputs: Any) -> Tensor:
        """Return what the user's network returns, as long as nothing was learned."""
        with self.mean():
            return self.outputs(inputs)

    def read(self, output: Any) -> Tensor:
        """Find the tensor of logits or means in the network's output."""
        return self.likelihood.read(output, self.output_key)

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
        ignored = getattr(self.likelihood, "ignore_index", -100)
        targets = beside_outputs(self._convention, batch, inputs, targets, ignored)
        return in_network_type(inputs, self.network), targets

    # -- modes ----------------------------------------------------------------------------------------------

    @contextmanager
    def mean(self) -> Iterator[Posterior]:
        """Switch the noise off for a while.

        The network then is the one at the posterior's mean; the mode before returns in any case. Like every mode, it is
        that of the thread or asyncio task which entered it, and of the tasks that this one starts inside; others are
        neither changed nor kept waiting. A generator that is suspended inside lends it to its caller meanwhile.
        """
        self._check_mean()
        with self.noise.mode(silent=True):
            yield self

    @contextmanager
    def drawn(self, *keys: Key) -> Iterator[Posterior]:
        """Fix the draws for a while: every pass is the function named by the key.

        With several keys, a pass on B rows returns all draws together as (S B, ...) where
        `folds` says that the posterior can.
        """
        with self.noise.mode(keys=keys):
            yield self

    def draw(self, seed: int = 0) -> Draw:
        """Return one coherent function of the posterior.

        The same seed is the same function, on every input: a function draw costs no copy of the network.
        """
        return Draw(self, self.keys(1, seed)[0])

    def keys(self, num_samples: int | None, seed: int) -> list[Key]:
        """Name `num_samples` draws of the posterior; None takes the posterior's own number.

        Posteriors with a finite number of functions, or with components, balance them here.
        """
        return [Key(seed, index) for index in range(self._count(num_samples))]

    def _count(self, num_samples: int | None) -> int:
        count = self.default_samples if num_samples is None else num_samples
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"num_samples must be a whole number of at least 1, but it is {count!r}.")
        return count

    def _check_mean(self) -> None:
        """Raise where the posterior has no mean network."""

    @property
    def folds(self) -> bool:
        """Whether several draws can be evaluated together as one larger batch."""
        return False

    def independent_rows(self, inputs: Any) -> bool:
        """Return whether a fresh pass on such inputs draws for each row: copies of a row then are several draws."""
        del inputs
        return False

    def sites(self) -> set[nn.Module]:
        """Return the modules at which randomness enters; what ran before them is the same for every draw."""
        return {self.network}

    def prepare(self, inputs: Any) -> None:
        """Find out from a batch what predictions without draws have to know."""

    # -- learning -------------------------------------------------------------------------------------------

    @property
    def learned(self) -> Literal[True] | str:
        """True, or a sentence: why nothing is random yet, and what to call.

        Posteriors that are random as they are made (MC dropout, BayesAdapter) have nothing to wait for.
        """
        return True

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors whose shape only training decides the shape they have in a state that will be loaded."""

    def loss(
        self,
        batch: Any,
        *,
        num_data: int,
        likelihood: str | Likelihood | None = None,
        foreign: Any = None,
        regulariser: UncertaintyRegulariser | None = None,
    ) -> LossTerms:
        """Return the loss of a batch, term by term, in mean nats per example.

        Args:
            batch: `(inputs, targets)`, or a mapping with a target key.
            num_data: The size n of the training set; terms that belong to the whole set are divided by it.
            likelihood: Sets the posterior's likelihood if given.
            foreign: Inputs, without targets, on which the posterior is to be uncertain.
            regulariser: How that is asked for; None takes `UncertaintyRegulariser()`.

        Returns:
            The terms by name, with their sum as `.total`.
        """
        if num_data < 1:
            raise ValueError(f"num_data is the number of training examples, but it is {num_data}.")
        if likelihood is not None:
            self.set_likelihood(likelihood)
        inputs, targets = self.split_batch(batch)
        self.noise.modes_learned = False  # what was looked at before with gradients on is not what is trained
        if foreign is None:
            return self.method.objective(self, inputs, targets, num_data)
        from bayesify.methods import UncertaintyRegulariser

        regulariser = regulariser or UncertaintyRegulariser()
        return regulariser.objective(self, inputs, targets, foreign, num_data)

    def set_likelihood(self, likelihood: str | Likelihood) -> None:
        """Say what the outputs mean; a likelihood with parameters must be set before the optimiser is made."""
        resolved = as_likelihood(likelihood)
        if isinstance(likelihood, str) and type(resolved) is type(self.likelihood):
            resolved = self.likelihood  # with what it has learned
        reference = next(iter(self.network.parameters()), None)
        if reference is not None:
            resolved = resolved.to(reference.device, torch.float64 if reference.dtype == torch.float64 else None)
        self.likelihood = resolved

    def extra_repr(self) -> str:
        """Show the method."""
        return f"method={self.method}"


class Draw:
    """One coherent function of a posterior: the same weights for every input it is called on."""

    def __init__(self, posterior: Posterior, key: Key) -> None:
        self.posterior = posterior
        self.key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the function; arguments and outputs are the network's own."""
        with self.posterior.drawn(self.key):
            return self.posterior(*args, **kwargs)

    def __repr__(self) -> str:
        """Show the key."""
        return f"Draw({self.key})"


def _rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    try:
        return batch_rows([list(args), dict(kwargs)])
    except ValueError:
        return 1  # inputs without tensors: nothing to fold


def require_posterior(value: object) -> None:
    """Raise, and say what to do, if somebody gives a plain network."""
    if not isinstance(value, Posterior):
        raise TypeError(
            f"This needs a posterior, but got a {type(value).__name__}. Make one of your network first: "
            "posterior = bayesify.convert(network, method)."
        )


def warn_unless_learned(posterior: Posterior, *, stacklevel: int = 3) -> None:
    """Warn, once for each posterior, if it is not random because it never learned."""
    if posterior._asked:
        return
    posterior._asked = True
    reason = posterior.learned
    if reason is not True:
        warnings.warn(f"This posterior has no uncertainty yet: {reason}", stacklevel=stacklevel)
