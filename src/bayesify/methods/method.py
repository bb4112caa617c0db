"""What a method is: a frozen configuration of how a posterior is built and learned."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bayesify._core.deprecation import renamed_fields, warn_renamed, with_new_keys
from bayesify._core.values import fits, misfits
from bayesify.laws import LossTerms, MemberLaw

if TYPE_CHECKING:
    from bayesify.laws import Law, Posterior
    from bayesify.methods.ood_regularizer import OODRegularizer
    from bayesify.selection import Conversion, Selection

__all__ = [
    "Method",
    "Schedule",
    "Stage",
    "Survey",
    "as_method",
    "list_methods",
    "member_losses",
    "member_stages",
    "method_from_dict",
    "rate_factor",
    "register",
    "trained_members",
]

_METHODS: dict[str, type[Method]] = {}
Schedule = Literal["constant", "cosine", "held"]
_OLD_FUNCTIONS = {"make_optimiser": "make_optimizer", "prepare_optimiser": "prepare_optimizer"}


@dataclass(frozen=True)
class Stage:
    """A part of the training that has its own optimiser: the whole of it, or one member.

    Attributes:
        name: What the progress bar calls it.
        groups: Parameter groups of the optimiser.
        context: Entered around each step and each evaluation of the stage.
        members: How many members it trains, if the loss is the mean of theirs; each then has the gradient of its own.
    """

    name: str
    groups: list[dict[str, Any]]
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    members: int = 1


class Survey(ABC):
    """What a method learns from passes over the data after the epochs, without an optimiser.

    All it has learned so far is in the posterior's buffers, so that a run that was killed can go on.
    """

    @abstractmethod
    def begin(self, val_loader: Iterable[Any] | None) -> None:
        """Check that there is all that `end` needs, before anything is computed."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was learned from data before."""

    @abstractmethod
    def look(self, batch: Any) -> None:
        """Learn from a batch, on the posterior's device; the network is in evaluation mode."""

    @abstractmethod
    def end(self, val_loader: Iterable[Any] | None) -> None:
        """Act after the last batch."""

    def sums(self) -> list[Tensor]:
        """Return the sums over examples so far, which processes that see parts of the data add up."""
        return []

    def tolerated_rise(self) -> float:
        """Return by how many nats the NLL of training examples may rise before it is warned of."""
        return 0.1


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How a posterior is built from a network, and how it is learned.

    A method is data: frozen, versioned, JSON-serialisable. Its functions take the posterior as an argument.

    Attributes:
        epochs: How many epochs `fit` takes if the caller does not say; 0 when nothing has to be learned.
        lr: The learning rate.
        optimizer: "sgd" (with Nesterov momentum .9) or "adam".
        weight_decay: Of the optimiser: with "sgd" the precision of a Gaussian prior divided by the number of data. With
            "adam" it is decoupled (AdamW), and no prior has its effect.
        schedule: "constant"; "cosine" to zero at the end of the run; "held", the schedule of SWA: constant for half of
            the run, then linear to 1 % at nine tenths of it.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    trains_draws: ClassVar[bool] = True  # whether the pass that is trained is random
    trains_in_parts: ClassVar[bool] = True  # whether a process may have a part of each weight only, by fully_shard
    trains_together: ClassVar[bool] = False  # whether several stages can be one, whose loss is the mean of theirs
    renamed: ClassVar[dict[str, str]] = {"optimiser": "optimizer"}  # settings by the names that older files have
    if_worse: ClassVar[str] = "Lower the learning rate or the noise, or fit for more epochs."  # said after a bad fit

    epochs: int = 0
    lr: float = 0.01
    optimizer: Literal["sgd", "adam"] = "sgd"
    weight_decay: float = 0.0
    schedule: Schedule = "constant"

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a class that overrides functions by their old names have them called."""
        super().__init_subclass__(**options)
        for old, new in _OLD_FUNCTIONS.items():
            if old in cls.__dict__:
                warn_renamed(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}")
                setattr(cls, new, cls.__dict__[old])

    def __getattr__(self, name: str) -> Any:
        """Find functions by their old names."""
        if name not in _OLD_FUNCTIONS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_renamed(f"{type(self).__name__}.{name}", f"{type(self).__name__}.{_OLD_FUNCTIONS[name]}")
        return getattr(self, _OLD_FUNCTIONS[name])

    @property
    def learns(self) -> bool:
        """Whether `fit` learns something: in epochs, or from a pass over the data after them.

        >>> from bayesify import MAP, SWAG, Laplace
        >>> MAP().learns, SWAG().learns, Laplace().learns
        (False, True, True)
        """
        return self.epochs > 0 or self.surveys

    @property
    def surveys(self) -> bool:
        """Whether `fit` makes a pass over the data after the epochs, if there are any."""
        return type(self).survey is not Method.survey

    @property
    def beside_adapters(self) -> bool:
        """Whether the method itself says where randomness enters, also in a network with an adapter."""
        return False

    @property
    def learns_by_loss(self) -> bool:
        """Whether all that is learned is learned by following the gradient of the loss; else a loop needs a `Learner`.

        >>> from bayesify import SWAG, MCDropout
        >>> MCDropout().learns_by_loss, SWAG().learns_by_loss
        (True, False)
        """
        more = ("after_step", "finish", "survey", "make_optimizer", "prepare_optimizer")
        return all(getattr(type(self), name) is getattr(Method, name) for name in more)

    # -- building -------------------------------------------------------------------------------------------

    @abstractmethod
    def build(self, network: nn.Module, selection: Selection) -> tuple[Law, Conversion]:
        """Make the law of what is random in a private copy of the network, and the table of what was converted."""

    def state(self, posterior: Posterior) -> nn.Module | None:
        """Return what only learning needs, such as chains; it is in checkpoints, and not in what `save` writes."""
        del posterior
        return None

    def learning(self, posterior: Posterior) -> Any:
        """Return what only learning needs, made anew where a posterior was loaded or has dropped it."""
        if posterior.learning is None:
            posterior.learning = self.state(posterior)
        return posterior.learning

    # -- learning -------------------------------------------------------------------------------------------

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the loss terms of a batch; by default `terms` of one stochastic pass."""
        return self.terms(posterior, self.outputs(posterior, inputs), targets, num_data)

    def terms(self, posterior: Posterior, outputs: Tensor, targets: Any, num_data: int) -> LossTerms:
        """Return the loss terms of a pass's outputs; by default their mean negative log-likelihood."""
        del num_data
        return LossTerms(nll=posterior.likelihood.nll(outputs, targets))

    def outputs(self, posterior: Posterior, inputs: Any, *, ood_rows: int = 0) -> Tensor:
        """Return the outputs of the pass that is trained and validated; by default one stochastic pass.

        Args:
            posterior: The posterior.
            inputs: B examples.
            ood_rows: How many of the last rows must not enter the statistics of normalisation.
        """
        p = posterior.present()
        p.ood_rows = ood_rows
        return posterior.outputs(inputs, p)

    def finite(self, posterior: Posterior, inputs: Any) -> bool:
        """Return whether the outputs of all that is trained beside `outputs`' pass are finite."""
        del posterior, inputs
        return True

    def regularizer(self) -> OODRegularizer:
        """Return how OOD inputs are asked to be uncertain, if the caller does not say."""
        from bayesify.methods.ood_regularizer import OODRegularizer

        return OODRegularizer()

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return the stages of the training; by default one, over all parameters that are not frozen."""
        return [Stage(self.name, [{"params": [p for p in posterior.parameters() if p.requires_grad]}])]

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the optimiser of a stage."""
        if self.optimizer == "adam":
            return torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay)

    def prepare_optimizer(  # noqa: B027
        self, posterior: Posterior, optimizer: Optimizer, num_data: int
    ) -> None:
        """Look at a stage's optimiser, the method's own or the caller's, before its first step."""

    def make_schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Return the schedule of a stage's learning rates, advanced once per optimiser step."""
        return LambdaLR(optimizer, rate_factor(self.schedule, total_steps))

    def after_step(  # noqa: B027, most methods have nothing to do here
        self, posterior: Posterior, step: int, total_steps: int, steps_per_epoch: int
    ) -> None:
        """Act after an optimiser step; steps count from 1."""

    def finish(  # noqa: B027
        self, posterior: Posterior, loader: Iterable[Any], progress: Callable[..., Any]
    ) -> None:
        """Act once after the last epoch."""

    def survey(self, posterior: Posterior, num_data: int) -> Survey | None:
        """Return what is learned from a pass over the data after the epochs; by default nothing."""
        del posterior, num_data
        return None

    # -- data -----------------------------------------------------------------------------------------------

    @classmethod
    def example(cls) -> Method:
        """Return a small configuration for demonstrations, quick on little data."""
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values.

        >>> from bayesify import MCDropout
        >>> MCDropout(p=0.2).to_dict()["p"]
        0.2
        """
        return {"name": self.name, "version": self.version, **dataclasses.asdict(self)}


def member_losses(posterior: Posterior, loss: Callable[[int], LossTerms]) -> LossTerms:
    """Return the present member's loss, or the mean over members, term by term, when none is chosen."""
    if posterior.present_part is not None:
        return loss(posterior.present_part)
    losses = []
    for index in trained_members(posterior):
        with posterior.member(index):
            losses.append(loss(index))
    return LossTerms({name: torch.stack([terms[name] for terms in losses]).mean() for name in losses[0]})


def member_stages(posterior: Posterior) -> list[Stage]:
    """Return one stage for each member, over its own parameters and the likelihood's."""
    shared = list(posterior.likelihood.parameters())
    law, trained = cast(MemberLaw, posterior.law), trained_members(posterior)
    return [
        Stage(
            f"member {number}/{len(trained)}",
            [{"params": [*law.part(index).parameters(), *shared]}],
            partial(posterior.member, index),
        )
        for number, index in enumerate(trained, 1)
    ]


def trained_members(posterior: Posterior) -> list[int]:
    """Return the members that have parameters of their own, which a network that is kept as it is has not; else all."""
    laws = cast(MemberLaw, posterior.law).laws
    own = [index for index, part in enumerate(laws) if next(part.parameters(), None) is not None]
    return own or list(range(len(laws)))


def rate_factor(schedule: Schedule, total_steps: int) -> Callable[[int], float]:
    """Return what a learning rate is multiplied by, as a function of the step.

    >>> [round(rate_factor("held", 100)(step), 3) for step in (0, 50, 70, 90, 100)]
    [1.0, 1.0, 0.505, 0.01, 0.01]
    """
    total = max(total_steps, 1)
    if schedule == "cosine":
        return lambda step: 0.5 * (1 + math.cos(math.pi * min(step, total) / total))
    if schedule == "held":
        return lambda step: 1 - 0.99 * min(max(step / total - 0.5, 0) / 0.4, 1)
    return lambda step: 1.0


def register(cls: type[Method]) -> type[Method]:
    """Make a method known by its name, to `convert`, to files, to the command line and to the demo."""
    _METHODS[cls.name] = renamed_fields(**cls.renamed)(cls)
    return cls


def list_methods() -> dict[str, type[Method]]:
    """Return the registered methods by name.

    >>> import bayesify
    >>> [name for name in sorted(bayesify.list_methods()) if name.startswith("m")]
    ['map', 'mc-dropout']
    """
    return dict(_METHODS)


def as_method(method: Method | type[Method] | str) -> Method:
    """Return a method for an object, a class or a name."""
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return method()
    if isinstance(method, str) and method in list_methods():
        return _METHODS[method]()
    raise ValueError(f"There is no method {method!r}. Give a method object, or one of {sorted(list_methods())}.")


def method_from_dict(values: dict[str, Any]) -> Method:
    """Rebuild a method from its configuration, of this version or an older one."""
    values = dict(values)
    name, version = values.pop("name", None), values.pop("version", None)
    if not isinstance(name, str) or name not in _METHODS:
        raise ValueError(f"The file names a method {name!r}, which is unknown here; known: {sorted(_METHODS)}.")
    cls = _METHODS[name]
    if not fits(version, int) or not 1 <= version <= cls.version:
        raise ValueError(
            f"The file has version {version!r} of {name!r}, and this bayesify knows versions up to {cls.version}. "
            "Upgrade bayesify."
        )
    values = with_new_keys(values, cls.renamed)
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"The file's {name!r} has unknown settings {unknown}; known: {sorted(known)}.")
    if wrong := misfits(values, cls):
        raise ValueError(f"The file's {name!r} has settings that cannot be: {', '.join(wrong)}.")
    tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return cls(**{**values, **tuples})
