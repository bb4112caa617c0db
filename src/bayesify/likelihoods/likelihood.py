"""What a likelihood is: the meaning of a network's outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify._core.deprecation import renamed
from bayesify._core.maths import IGNORED, as_double, at_least_float32
from bayesify._core.trees import output_tensor
from bayesify.likelihoods.gaussian_draws import gaussian_draws
from bayesify.likelihoods.pooling import Pooling, Temperatures
from bayesify.likelihoods.prediction import Prediction

__all__ = ["KINDS", "Likelihood", "Stream", "variance_of"]

KINDS: dict[str, type[Likelihood]] = {}

MOST_OUTPUTS = 512  # of an example, whose Hessian is found by differentiating twice


class Stream(ABC):
    """Collects draws one group at a time; memory does not grow with their number.

    Attributes:
        keeps_parts: Whether it must know which part of a mixture draws are of, also where all are calibrated alike.
    """

    keeps_parts: bool = False

    @abstractmethod
    def add(self, outputs: Tensor, *, part: int = 0, view: int = 0) -> None:
        """Add outputs of some draws, (S, B, ...), of one part of a mixture, on one view of the inputs."""

    @abstractmethod
    def result(self) -> Prediction:
        """Return the prediction that all draws together make."""

    def add_gaussian(
        self,
        mean: Tensor,
        variance: Tensor | None,
        covariance: Tensor | None,
        *,
        num_draws: int,
        seed: int,
        part: int = 0,
        view: int = 0,
    ) -> None:
        """Add draws of Gaussian outputs; see `Likelihood.from_gaussian`."""
        for draws in gaussian_draws(mean, variance, covariance, num_draws=num_draws, seed=seed):
            self.add(draws, part=part, view=view)


class Likelihood(nn.Module, ABC):
    """The distribution of a target given the network's output.

    A module, since noise may be learned and calibration is kept here: `temperature`-like buffers act on
    predictions only, never on the loss.

    Attributes:
        ignore_index: The label of positions that do not count.
        side_by_side: How many tensors stand side by side in the outputs' last dimension: two, means and log variances,
            where the noise has a head.
    """

    kind: ClassVar[str]
    ignore_index: int = IGNORED
    side_by_side: int = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the kind for configuration files."""
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    @property
    def calibrates_parts(self) -> bool:
        """Whether each part of a mixture has a temperature of its own."""
        temperature = self._buffers.get("temperature")
        return temperature is not None and temperature.ndim > 0

    @abstractmethod
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ln p(target | output) per example and position, (B, ...); ignored positions are NaN-free zeros."""

    @abstractmethod
    def stream(self, *, keep_samples: bool = False) -> Stream:
        """Return a collector that turns outputs of draws into a prediction."""

    @abstractmethod
    def integrate(
        self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None, *, part: int = 0
    ) -> Prediction:
        """Return the prediction of Gaussian outputs without draws; see `from_gaussian`, which calls it."""

    @renamed(num_samples="num_draws")
    def from_gaussian(
        self,
        mean: Tensor,
        variance: Tensor | None = None,
        *,
        covariance: Tensor | None = None,
        num_draws: int | None = None,
        seed: int = 0,
        part: int = 0,
    ) -> Prediction:
        """Return the prediction of Gaussian outputs: what all predictors without draws of a network end in.

        Args:
            mean: (B, ...), as the network returns outputs.
            variance: Of independent outputs, the same shape; or
            covariance: (B, ..., F, F), of the last dimension's F outputs.
            num_draws: None integrates, the same for every call; else how many draws of the outputs are averaged.
            seed: Of these.
            part: Which part of a mixture they are of, where each has a temperature of its own.

        Example:
            >>> import torch
            >>> from bayesify import Gaussian
            >>> found = Gaussian(1.0).from_gaussian(torch.zeros(2, 1), torch.ones(2, 1))
            >>> found.epistemic, found.aleatoric
            (tensor([1., 1.]), tensor([1., 1.]))
        """
        if (variance is None) == (covariance is None):
            raise ValueError("Give the outputs' variance or their covariance, one of the two.")
        if num_draws is None:
            return self.integrate(mean, variance, covariance, part=part)
        stream = self.stream()
        stream.add_gaussian(mean, variance, covariance, num_draws=num_draws, seed=seed, part=part)
        return stream.result()

    def mixture(self, parts: Sequence[Prediction], weights: Sequence[float], *, views: bool = False) -> Prediction:
        """Return the mixture of predictions that this likelihood made, calibrated as draws are; see `Prediction`."""
        return Prediction.mixture(parts, weights, views=views)

    def gaussian_log_prob(
        self, target: Tensor, mean: Tensor, variance: Tensor | None = None, *, covariance: Tensor | None = None
    ) -> Tensor:
        """Return ln of the expectation of p(target | output) over Gaussian outputs, (B, ...), in float64."""
        return self.from_gaussian(mean, variance, covariance=covariance).log_prob(self.marked(target))

    def from_samples(self, outputs: Tensor, *, keep_samples: bool = False) -> Prediction:
        """Return the prediction that outputs of draws, (S, B, ...), make together."""
        stream = self.stream(keep_samples=keep_samples)
        stream.add(outputs)
        return stream.result()

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return ln p of every class for outputs of draws (S, B, ...), classes last; differentiable."""
        del outputs
        raise ValueError(f"{type(self).__name__} has no classes, so there is no mutual information of draws.")

    # -- scores -----------------------------------------------------------------------------------------------------

    def weight(self, target: Tensor) -> Tensor | None:
        """Return a mask of the positions that count, (B, ...), or None when all do."""
        del target
        return None

    def marked(self, target: Tensor) -> Tensor:
        """Return the targets as predictions take them: labels of positions that do not count are -100."""
        weight = self.weight(target)
        return target if weight is None or target.is_floating_point() else target.long().where(weight > 0, IGNORED)

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean negative log-likelihood, in nats per position that counts."""
        self.check(output, target)
        log_prob = self.log_prob(output, target)
        weight = self.weight(target)
        if weight is None:
            return -log_prob.mean()
        return -(log_prob * weight).sum() / weight.sum().clamp_min(1)

    def mixture_log_prob(self, outputs: Sequence[Tensor] | Tensor, target: Tensor) -> Tensor:
        """Return ln (1/S) sum_s p(target | output s) of S draws' outputs (B, ...), in float64."""
        each = torch.stack([self.log_prob(output, target) for output in outputs])
        return as_double(each).logsumexp(0) - math.log(len(each))

    def total_nll(self, log_prob: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of -ln p over the positions that count, and their number, both in float64."""
        log_prob, weight = as_double(log_prob), self.weight(target)
        weight = torch.ones_like(log_prob) if weight is None else weight.to(log_prob).reshape(log_prob.shape)
        return -(log_prob * weight).sum(), weight.sum()

    # -- outputs ----------------------------------------------------------------------------------------------------

    def softmax_dim(self, ndim: int) -> int | None:
        """Return which dimension of outputs holds the logits of one softmax, which does not see a shift of them all.

        None where each output is on its own.
        """
        del ndim
        return None

    def num_classes(self, output: Tensor) -> int | None:
        """Return the number of classes that an output is about; None for likelihoods without classes."""
        del output
        return None

    def centre(self, output: Tensor) -> Tensor:
        """Return what of the outputs says where the answer lies: centred logits, or means."""
        return output

    def residuals(self, output: Tensor, target: Tensor) -> Tensor | None:
        """Return target - mean for likelihoods of numbers, else None."""
        del output, target
        return None

    def single_variance(self) -> float | None:
        """Return the noise variance where it is one number for all examples and outputs, else None."""
        return None

    def output_factor(
        self,
        output: Tensor,
        target: Tensor | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return S with S S' the Hessian of -ln p in the outputs, which Laplace's approximation is made of.

        By default ln p is differentiated twice. Where p is not log-concave, H may have negative eigenvalues, which have
        no Gaussian: with H = Q diag(l) Q', S = Q diag(sqrt(max(l, 0))). A likelihood that knows better overrides this,
        with the expectation of H over the target's own distribution (the Fisher information) where that differs.

        Args:
            output: (B, ...).
            target: The targets; likelihoods whose H does not depend on them can do without.
            num_draws: None is exact; else R, of columns that are random, with S S' right in expectation.
            generator: For these.

        Returns:
            (B, T, F, R): an example's outputs are T groups of F, each with a Hessian of its own, F x F. They stand in
            the outputs' order, but for `softmax_dim`, which stands last.

        Example:
            >>> from bayesify import Custom
            >>> poisson = Custom(lambda output, target: (target * output - output.exp())[:, 0])
            >>> poisson.output_factor(torch.zeros(1, 1), torch.ones(1, 1))
            tensor([[[[1.]]]])
        """
        if target is None:
            raise ValueError(f"The curvature of a {type(self).__name__} likelihood depends on the targets: give them.")
        hessian = self._hessian(output.detach(), target)
        values, vectors = torch.linalg.eigh(hessian)
        factor: Tensor = (vectors * values.clamp_min(0).sqrt()[:, None])[:, None]
        if num_draws is None:
            return factor
        shape = (len(factor), 1, factor.shape[-1], num_draws)
        signs = torch.randint(2, shape, generator=generator, device=factor.device)
        drawn: Tensor = factor @ (2 * signs - 1).to(factor) / math.sqrt(num_draws)
        return drawn

    def _hessian(self, output: Tensor, target: Tensor) -> Tensor:
        """Return d^2 (-ln p) / d output^2 of each example, (B, F, F), by one backward pass for each output."""
        number = output[0].numel() if len(output) else 0
        if number > MOST_OUTPUTS:
            raise ValueError(
                f"A {type(self).__name__} likelihood's curvature is found by differentiating twice, in {MOST_OUTPUTS} "
                f"outputs of an example at most, and here are {number:,}. Write its output_factor, or use "
                "Laplace(curvature='fisher')."
            )
        with torch.enable_grad():
            leaf = at_least_float32(output.reshape(len(output), -1)).requires_grad_()
            log_prob = self.log_prob(leaf.view(output.shape), target).sum()
            (slope,) = torch.autograd.grad(-log_prob, leaf, create_graph=True)
            rows = [
                torch.autograd.grad(slope[:, index].sum(), leaf, retain_graph=True, materialize_grads=True)[0]
                if slope.requires_grad
                else torch.zeros_like(leaf)
                for index in range(number)
            ]
        found = torch.stack(rows, 1).detach()
        if not bool(found.isfinite().all()):
            raise ValueError(
                "The second derivative of ln p of an example is not finite, so there is no curvature. Check the "
                "inputs, the targets and the network's weights, or use Laplace(curvature='fisher')."
            )
        # Two examples may be where a loss is linear, as Huber's is far out; three are taken for the likelihood's way.
        if len(output) > 2 and not bool(found.any()) and bool(slope.any()):
            raise ValueError(
                f"ln p of this {type(self).__name__} likelihood has no second derivative in the outputs, so that there "
                "is no curvature. Use the empirical Fisher, Laplace(curvature='fisher'), which needs the first alone."
            )
        return (found + found.mT) / 2

    def at_start(self) -> bool:
        """Return whether there are parameters to learn, and all are where a new likelihood has them.

        >>> from bayesify import Gaussian
        >>> Gaussian().at_start(), Gaussian(1.0).at_start()
        (True, False)
        """
        own = dict(self.named_parameters())
        if not own:
            return False
        fresh = dict(type(self)(**self.config()).named_parameters())
        return all(bool((own[name] == value.to(own[name])).all()) for name, value in fresh.items())

    def learn(self, output: Tensor, target: Tensor) -> float:
        """Set the likelihood's own parameters to those of least NLL for a network's outputs, and return that NLL.

        For a network that is trained already, where no optimiser of `fit` learns them beside it: `Laplace`, `MAP`.
        Thresholds, noise, dispersion and degrees of freedom are found by L-BFGS; outputs stay as they are.

        Args:
            output: The network's outputs on training data, (N, ...).
            target: The targets.

        Example:
            >>> from bayesify import Gaussian
            >>> likelihood = Gaussian()
            >>> likelihood.learn(torch.zeros(2, 1), torch.tensor([-3.0, 3.0])), likelihood.log_noise.exp().item()
            (2.5175, 3.0000)
        """
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not parameters:
            raise ValueError(f"{type(self).__name__} has no parameters to learn.")
        optimizer = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe")
        output = output.detach()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.nll(output, target)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with torch.enable_grad():
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        with torch.no_grad():
            return self.nll(output, target).item()

    def calibrate(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        parts: Sequence[int] = (),
        pooling: Pooling | float = "probs",
        temperatures: Temperatures = "one",
    ) -> tuple[float, float]:
        """Fit the calibration to outputs of draws.

        Args:
            batches: Draws' outputs (S, B, ...) and targets.
            parts: Which part of a mixture each draw is of; none says that there is one.
            pooling: How the draws' probabilities are averaged; see `bayesify.calibrate`.
            temperatures: "one", or "each", one for each part, or "auto".

        Returns:
            The NLL before and after.
        """
        raise ValueError(f"{type(self).__name__} has nothing to calibrate.")

    def held_out_nll(self, batches: Sequence[tuple[Tensor, Tensor]], *, parts: Sequence[int] = ()) -> Tensor:
        """Return the mean NLL of each example, (E,), as `calibrate` would leave it, fitted on other examples.

        Five folds: each is judged by what the other four calibrate. Here, where nothing is calibrated, as it is.

        Args:
            batches: As in `calibrate`.
            parts: As in `calibrate`.
        """
        del parts
        each = [self.from_samples(outputs).log_prob(self.marked(target)) for outputs, target in batches]
        return -torch.cat([one.reshape(len(one), -1).mean(1) for one in each])

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors whose shape calibration decides the shape that they have in a state that will be loaded."""

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise, with a sentence, where output and target do not fit."""

    def read(self, output: Any, key: str | int | None) -> Tensor:
        """Find this likelihood's tensor in a structured output."""
        return output_tensor(output, key)

    def labels(self, target: Tensor) -> Tensor | None:
        """Return the classes that targets count as, -100 where none does; None for likelihoods without classes."""
        del target
        return None

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, for configuration files."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values."""
        return {"kind": self.kind, **self.config()}


def variance_of(variance: Tensor | None, covariance: Tensor | None) -> Tensor:
    """Return the variances, in at least float32, of outputs of which one of the two is known.

    >>> import torch
    >>> variance_of(None, torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    tensor([2., 3.])
    """
    if variance is None:
        assert covariance is not None
        variance = covariance.diagonal(dim1=-2, dim2=-1)
    return at_least_float32(variance)
