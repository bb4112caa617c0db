"""The four ways to make a prediction, and which of them a posterior has."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from bayesify._core.deprecation import warn_renamed
from bayesify.laws import Posterior, Refusal
from bayesify.likelihoods import Stream
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction.features import FeatureStream, features_read
from bayesify.prediction.sampling import add_views
from bayesify.prediction.views import ONE, Views

__all__ = [
    "PREDICTORS",
    "Engine",
    "How",
    "Linearised",
    "Mean",
    "Predictor",
    "Request",
    "Sampling",
    "Streamlined",
    "as_predictor",
    "capabilities",
]

Answer = Literal[True] | Refusal
Engine = Literal["auto", "moments", "principal", "margin"]
Covariance = Literal["none", "full", "per-head"]
Members = Literal["each", "matched"]
Chunk = Callable[[Any, Tensor | None], Prediction]


@dataclass(frozen=True)
class Request:
    """What a prediction is asked for; see `predict`."""

    num_draws: int | None = None
    seed: int = 0
    keep_samples: bool = False
    output: str = "prediction"
    variance_scale: float | Mapping[str, float] = 1.0
    input_variance: Tensor | None = None
    views: Views = ONE


class Predictor(ABC):
    """A way to make a prediction.

    Subclasses are frozen dataclasses; to call one is to call `predict` with it.

    Attributes:
        name: What `predict(how=...)` calls it.
        random: Whether what it says depends on draws of the network.
        variances: Whether it has variances without draws, which can be scaled.
        breadth: How many times as many examples a pass takes as keep its widest activation in the cache.
    """

    name: ClassVar[str]
    random: ClassVar[bool] = False
    variances: ClassVar[bool] = False
    breadth: ClassVar[int] = 1

    @abstractmethod
    def supports(self, posterior: Posterior) -> Answer:
        """True, or why a posterior cannot be predicted with so, and what can be done instead.

        The posterior's law is asked. Networks may still have something that there is no rule for.
        """

    def check(self, request: Request) -> None:
        """Raise where something is asked for that this predictor does not have."""
        if request.input_variance is not None:
            raise ValueError(
                f"how={self.name!r} takes inputs as they are. Use how=Streamlined(engine='moments') for an "
                "input_variance."
            )

    @abstractmethod
    def prepared(self, posterior: Posterior, inputs: Any, request: Request) -> Chunk:
        """Return what predicts chunks of a batch, given the chunk and the variance of its inputs."""

    def __call__(self, posterior: Posterior, inputs: Any, **options: Any) -> Prediction:
        """Predict: `predict(posterior, inputs, how=self, ...)`."""
        from bayesify.prediction import predict

        return predict(posterior, inputs, how=self, **options)

    def __repr__(self) -> str:
        """Show what differs from the defaults."""
        values = ((field, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        shown = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, repr=False)
class Sampling(Predictor):
    """Average draws: p(y|x) = (1/S) sum_s p(y | f_s(x)). Every posterior has it.

    Example:
        >>> Sampling()
        Sampling()
    """

    name: ClassVar[str] = "sampling"
    random: ClassVar[bool] = True

    def supports(self, posterior: Posterior) -> Answer:
        """True, unless batch-normalisation statistics are older than the weights."""
        return True if posterior.statistics is None else posterior.statistics.is_fresh()

    def prepared(self, posterior: Posterior, inputs: Any, request: Request) -> Chunk:
        """Name the draws."""
        del inputs
        keys = posterior.keys(request.num_draws, request.seed)
        plan = request.views.plan(keys, finite=posterior.law.functions is not None)
        return lambda chunk, _: _collected(
            posterior, chunk, request, lambda stream: add_views(posterior, chunk, request.views, plan, stream)
        )


@dataclass(frozen=True, repr=False)
class Mean(Predictor):
    """One pass of the mean network, which has no epistemic uncertainty.

    Example:
        >>> Mean()
        Mean()
    """

    name: ClassVar[str] = "mean"

    def supports(self, posterior: Posterior) -> Answer:
        """True where the posterior has a mean network, in the present mode."""
        return posterior.has_mean()

    def prepared(self, posterior: Posterior, inputs: Any, request: Request) -> Chunk:
        """Ask for the mean network."""
        del inputs
        posterior.require_mean()
        p = replace(posterior.present(), kind="mean", keys=())
        part = p.part if isinstance(p.part, int) else 0

        def add(chunk: Any, stream: Stream) -> None:
            for seen, one in request.views.streams(posterior.likelihood, chunk, stream):
                one.add(posterior.outputs(seen, replace(p))[None], part=part)

        return lambda chunk, _: _collected(posterior, chunk, request, lambda stream: add(chunk, stream))


class _WithoutDraws(Predictor):
    """What predictors of means and variances share."""

    variances: ClassVar[bool] = True
    breadth: ClassVar[int] = 2  # activations that wait for a backward pass leave the cache, and calls cost more

    def supports(self, posterior: Posterior) -> Answer:
        """True where the posterior's law is a mixture of Gaussians, in weights or in layers' noise."""
        if posterior.statistics is not None and not (fresh := posterior.statistics.is_fresh()):
            return fresh
        found = posterior.components()
        return found if isinstance(found, Refusal) else True

    def check(self, request: Request) -> None:
        """Refuse features, samples, and numbers that can be none."""
        if request.output != "prediction":
            raise ValueError(
                f"how={self.name!r} predicts outputs, not features. Use how='sampling' for output={request.output!r}."
            )
        if request.keep_samples:
            raise ValueError(f"how={self.name!r} has no draws to keep. Use how='sampling' with keep_samples=True.")
        if request.num_draws is not None and request.num_draws < 1:
            raise ValueError(f"num_draws must be a whole number of at least 1, but it is {request.num_draws!r}.")
        scale = request.variance_scale
        if not isinstance(scale, Mapping) and not 0 <= scale < math.inf:
            raise ValueError(f"variance_scale must be at least 0 and finite, but it is {scale}.")

    def prepared(self, posterior: Posterior, inputs: Any, request: Request) -> Chunk:
        """Find the engine, which is kept until the posterior changes."""
        from bayesify.prediction.one_pass import one_pass_of

        found = one_pass_of(posterior, self, inputs)
        return lambda chunk, spread: found.predict(
            chunk,
            num_draws=request.num_draws,
            seed=request.seed,
            scale=request.variance_scale,
            input_variance=spread,
            views=request.views,
        )


def _check_number(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but it is {value!r}.")


@dataclass(frozen=True, repr=False)
class Streamlined(_WithoutDraws):
    """Mean and variance of the outputs in one pass, for posteriors that are mixtures of Gaussians or of noisy layers.

    Attributes:
        engine: "auto" takes the one that suits the network, and a random last layer's closed form; "moments" carries
            means and variances forward; "principal" and "margin" take one backward pass each, for where the logits
            move most, and for the difference of the top two.
        directions: Of "principal": along how many directions of the logits the variance is found by a backward pass.
        sketch: How many random vectors stand, beside each example's own, for the input channels of a layer whose
            weight meets many positions while a backward pass adds up squares; 0 adds up all channels.
        covariance: "none"; "full" carries covariances through stacks of linear layers and activations; "per-head"
            carries those within each head of attention. Both are of "moments".
        members: "each" takes a pass for each member; "matched" takes one pass for all, where they differ in scales and
            shifts of normalisation layers alone (ABNN): one Gaussian with the members' mean and covariance, exact to
            first order in what they differ by. `check` tells whether they are near enough.

    Example:
        >>> Streamlined(engine="moments")
        Streamlined(engine='moments')
        >>> Streamlined(directions=2)  # a second backward pass: a better order, for one plain pass more
        Streamlined(directions=2)
    """

    name: ClassVar[str] = "streamlined"
    engine: Engine = "auto"
    covariance: Covariance = "none"
    directions: int = 1
    sketch: int = 1
    members: Members = "each"

    def __post_init__(self) -> None:
        """Refuse what there is not."""
        for name, value, known in (
            ("engine", self.engine, get_args(Engine)),
            ("covariance", self.covariance, get_args(Covariance)),
            ("members", self.members, get_args(Members)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {list(known)}, but it is {value!r}.")
        if self.covariance != "none" and self.engine not in ("auto", "moments"):
            raise ValueError(
                f"covariance={self.covariance!r} is carried forward, with engine='moments', and engine is "
                f"{self.engine!r}."
            )
        _check_number("directions", self.directions, least=1)
        _check_number("sketch", self.sketch, least=0)
        if self.directions > 1 and (self.covariance != "none" or self.engine not in ("auto", "principal")):
            raise ValueError(
                f"directions={self.directions} are of engine='principal', which takes a backward pass for each; it has "
                "no covariance that is carried forward. Leave engine and covariance out, or directions."
            )

    def prepared(self, posterior: Posterior, inputs: Any, request: Request) -> Chunk:
        """Find the engine; the variance of inputs can only be carried forward."""
        forward = request.input_variance is not None and self.engine == "auto" and self.directions == 1
        chosen = replace(self, engine="moments") if forward else self
        return _WithoutDraws.prepared(chosen, posterior, inputs, request)


@dataclass(frozen=True, repr=False)
class Linearised(_WithoutDraws):
    """The exact variance of every output to first order in what is random, by one backward pass each, ten at a time.

    Attributes:
        sketch: 0 is exact; R > 0 lets R random vectors, beside each example's own, stand for the input channels of
            layers whose weights meet many positions, which is right on average and costs about half.

    Example:
        >>> Linearised()
        Linearised()
    """

    name: ClassVar[str] = "linearised"
    sketch: int = 0

    def __post_init__(self) -> None:
        """Refuse what there is not."""
        _check_number("sketch", self.sketch, least=0)


How = Literal["sampling", "streamlined", "linearised", "mean"] | Predictor
_PREDICTORS: dict[str, Predictor] = {one.name: one for one in (Sampling(), Streamlined(), Linearised(), Mean())}
PREDICTORS: tuple[str, ...] = tuple(_PREDICTORS)
_OLD: dict[str, Predictor] = {
    "closed-form": Streamlined(),
    "moments": Streamlined(engine="moments"),
    "margin": Streamlined(engine="margin"),
    "principal": Streamlined(engine="principal"),
    "covariance": Streamlined(covariance="full"),
    "per-head": Streamlined(covariance="per-head"),
}


def as_predictor(
    how: str | Predictor,
    posterior: Posterior | None = None,
    *,
    among: Callable[[Predictor], bool] | None = None,
    stacklevel: int = 5,
) -> Predictor:
    """Return the predictor of a name, or the one that was given.

    Args:
        how: A name, or an object.
        posterior: What is to be predicted with; the old name "closed-form" is for a random last layer alone.
        among: Which predictors can be meant; None takes all.
        stacklevel: Of the warning that a name is old, as in `warn_renamed`.

    >>> as_predictor("streamlined")
    Streamlined()
    >>> as_predictor("magic")
    Traceback (most recent call last):
    ...
    ValueError: how must be one of ['sampling', 'streamlined', 'linearised', 'mean'], or an object such as \
Streamlined(engine='moments'), but it is 'magic'.
    """
    found = how if isinstance(how, Predictor) else _PREDICTORS.get(how)
    if found is None and how in _OLD:
        found = _OLD[str(how)]
        warn_renamed(f"how={how!r}", f"how={found!r}", stacklevel=stacklevel)
        if how == "closed-form" and posterior is not None:
            _require_closed_form(posterior)
    if found is None or (among is not None and not among(found)):
        names = [name for name, one in _PREDICTORS.items() if among is None or among(one)]
        raise ValueError(
            f"how must be one of {names}, or an object such as Streamlined(engine='moments'), but it is {how!r}."
        )
    return found


def capabilities(posterior: Posterior) -> dict[str, Answer]:
    """Return, for the name of each predictor, True, or why a posterior does not have it and what to do instead.

    The posterior's law is asked, never its class. `predict`, `check`, `export` and `evaluate` refuse with the same
    sentences.

    Example:
        >>> from torch import nn
        >>> from bayesify import DeepEnsemble, convert
        >>> found = capabilities(convert(nn.Linear(4, 3), DeepEnsemble(members=2)))
        >>> found["streamlined"], found["mean"][:50]
        (True, 'Members that were trained apart have no mean netwo')
    """
    return {name: predictor.supports(posterior) for name, predictor in _PREDICTORS.items()}


def _require_closed_form(posterior: Posterior) -> None:
    components = posterior.components()
    if isinstance(components, Refusal) or any(one.dense is None for one in components):
        raise ValueError(
            f"{posterior.law.described()} has no prediction in closed form, which is for a random last layer alone, "
            "Laplace(structure='last-layer'). Use how='streamlined', or how='sampling'."
        )


def _collected(posterior: Posterior, inputs: Any, request: Request, add: Callable[[Stream], None]) -> Prediction:
    """Return the prediction, or the features, of the outputs that are added to a stream."""
    if request.output == "prediction":
        stream = posterior.likelihood.stream(keep_samples=request.keep_samples)
        add(stream)
        return stream.result()
    with features_read(posterior, request.output, inputs) as features:
        collected = FeatureStream(features, request.keep_samples)
        add(collected)
        return collected.result()
