"""What a method is: a frozen configuration of how a posterior is built and learned."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bayesify.posteriors import LossTerms

if TYPE_CHECKING:
    from bayesify.convert import Selection
    from bayesify.posteriors import Posterior

__all__ = ["Method", "Stage", "as_method", "method_from_dict", "methods", "register"]

_METHODS: dict[str, type[Method]] = {}


@dataclass(frozen=True)
class Stage:
    """A part of the training that has its own optimiser: the whole of it, or one member.

    Attributes:
        name: What the progress bar calls it.
        groups: Parameter groups of the optimiser.
        context: Entered around each step and each evaluation of the stage.
    """

    name: str
    groups: list[dict[str, Any]]
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How a posterior is built from a network, and how it is learned.

    A method is data: frozen, versioned, JSON-serialisable. Its functions take the posterior as an argument.

    Attributes:
        epochs: How many epochs `fit` takes if the caller does not say; 0 when nothing has to be learned.
        lr: The learning rate.
        optimiser: "sgd" (with Nesterov momentum .9) or "adam".
        weight_decay: Of the optimiser: the precision of a Gaussian prior divided by the number of data.
        schedule: "constant", or "cosine" to zero at the end of the run.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    listed: ClassVar[bool] = True  # False for what a function makes of a posterior, and `fit` does not learn

    epochs: int = 0
    lr: float = 0.01
    optimiser: Literal["sgd", "adam"] = "sgd"
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"

    # -- building -------------------------------------------------------------------------------------------

    @abstractmethod
    def build(self, network: nn.Module, selection: Selection) -> Posterior:
        """Make the posterior from a private copy of the network."""

    # -- learning -------------------------------------------------------------------------------------------

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the loss terms of a batch; by default the mean negative log-likelihood of one stochastic pass."""
        del num_data
        return LossTerms(nll=posterior.likelihood.nll(self.outputs(posterior, inputs), targets))

    def outputs(self, posterior: Posterior, inputs: Any) -> Tensor:
        """Return the outputs of the pass that is trained and validated; by default one stochastic pass."""
        return posterior.outputs(inputs)

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return the stages of the training; by default one, over all parameters that are not frozen."""
        return [Stage(self.name, [{"params": [p for p in posterior.parameters() if p.requires_grad]}])]

    def make_optimiser(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the optimiser of a stage."""
        if self.optimiser == "adam":
            return torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay)

    def make_schedule(self, optimiser: Optimizer, total_steps: int) -> LambdaLR:
        """Return the schedule of a stage's learning rates, advanced once per optimiser step."""
        if self.schedule == "cosine":
            half = torch.pi / max(total_steps, 1)
            return LambdaLR(optimiser, lambda step: 0.5 * (1 + torch.cos(torch.tensor(step * half)).item()))
        return LambdaLR(optimiser, lambda step: 1.0)

    def after_step(  # noqa: B027, most methods have nothing to do here
        self, posterior: Posterior, step: int, total_steps: int, steps_per_epoch: int
    ) -> None:
        """Act after an optimiser step; steps count from 1."""

    def finish(  # noqa: B027
        self, posterior: Posterior, loader: Iterable[Any], progress: Callable[..., Any]
    ) -> None:
        """Act once after the last epoch."""

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


def register(cls: type[Method]) -> type[Method]:
    """Make a method known by its name, to `convert`, to files, and to the demo."""
    _METHODS[cls.name] = cls
    return cls


def methods() -> dict[str, type[Method]]:
    """Return the registered methods by name; those that only files need to know are left out."""
    return {name: cls for name, cls in _METHODS.items() if cls.listed}


def as_method(method: Method | type[Method] | str) -> Method:
    """Return a method for an object, a class or a name."""
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return method()
    if isinstance(method, str) and method in methods():
        return _METHODS[method]()
    raise ValueError(f"There is no method {method!r}. Give a method object, or one of {sorted(methods())}.")


def method_from_dict(values: dict[str, Any]) -> Method:
    """Rebuild a method from its configuration, of this version or an older one."""
    values = dict(values)
    name, version = values.pop("name", None), values.pop("version", None)
    if name not in _METHODS:
        raise ValueError(f"The file names a method {name!r}, which is unknown here; known: {sorted(_METHODS)}.")
    cls = _METHODS[name]
    if not isinstance(version, int) or version > cls.version:
        raise ValueError(
            f"The file has version {version} of {name!r}, and this bayesify knows versions up to {cls.version}. "
            "Upgrade bayesify."
        )
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"The file's {name!r} has unknown settings {unknown}; known: {sorted(known)}.")
    tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return cls(**{**values, **tuples})
