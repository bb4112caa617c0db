"""BayesAdapter: Gaussian weights by fine-tuning a trained network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bayesify.laws import Estimator, GaussianLaw, LossTerms, Posterior
from bayesify.laws.tensors import tensor_of
from bayesify.methods.method import Method, Stage, rate_factor, register
from bayesify.selection import Conversion, Selection, require_something, select_parameters

__all__ = ["BayesAdapter"]

_LOG_STDS = "log standard deviations"


@register
@dataclass(frozen=True, kw_only=True)
class BayesAdapter(Method):
    """Fine-tune a trained network into one with Gaussian weights (Deng et al. 2020).

    Minimises mean NLL + temperature KL(q || p) / n over q(w) = N(mu, diag exp(2 psi)), from mu = the trained weights.
    The prior is p = N(m, prior_std^2), and n the number of training examples. A step costs little more than one of
    plain training (`benchmarks/adapter.py`), and memory is that of plain training and of psi; prediction costs a plain
    pass per draw.

    Attributes:
        estimator: How a training pass is random: "auto", "exemplar", "local", "flipout" or "shared"; see
            `GaussianLaw`.
        start_std: psi starts as ln of numbers whose logarithms are uniform between those of these two (the paper's
            e^-6 to e^-5).
        prior: Its mean m: "zero", or "pretrained", the trained weights (MOPED, Krishnan et al. 2020).
        prior_std: Its standard deviation; None takes 1 / sqrt(weight_decay n), which makes training with that weight
            decay the mode of the posterior.
        weight_decay: That of the network's training; the prior acts instead of it, the optimiser applies none.
        prior_gradient: "autograd" adds KL/n to the loss; "built-in" adds its gradient, weight_decay (mu - m) and
            weight_decay exp(2 psi) - 1/n, before each step (the paper's figure 1). The steps of SGD are the same.
        temperature: Of the posterior; below 1 it is colder than Bayes' rule has it.
        lr: Of the means.
        log_std_lr: Of psi.
        log_std_schedule: Of psi's rate: "steps" multiplies it by 0.2 after each quarter of the run (appendix B),
            "constant", or "cosine" to zero. `schedule` is that of the means.
        statistics: "updated" trains with the statistics of each batch, as the network was trained, and updates the
            running ones; "frozen" normalises by the running statistics in training too and keeps them, so that what
            is trained is what predicts, whatever the batch size. Small batches want the second.
        seed: Of the start of psi.
    """

    name = "bayes-adapter"
    renamed: ClassVar[dict[str, str]] = {**Method.renamed, "noise": "estimator"}

    estimator: Estimator = "auto"
    start_std: tuple[float, float] = (math.exp(-6), math.exp(-5))
    prior: Literal["zero", "pretrained"] = "zero"
    prior_std: float | None = None
    weight_decay: float = 2e-4
    prior_gradient: Literal["autograd", "built-in"] = "autograd"
    temperature: float = 1.0
    epochs: int = 40
    lr: float = 8e-4
    log_std_lr: float = 0.1
    log_std_schedule: Literal["steps", "constant", "cosine"] = "steps"
    statistics: Literal["updated", "frozen"] = "updated"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        low, high = self.start_std
        if not 0 <= low <= high < math.inf or (low == 0) != (high == 0):
            raise ValueError(
                f"start_std must be two numbers 0 < low <= high, or (0, 0) for no noise, but it is {self.start_std}."
            )
        if self.statistics not in ("updated", "frozen"):
            raise ValueError(f"statistics must be 'updated' or 'frozen', but it is {self.statistics!r}.")
        if self.estimator not in (kinds := ("auto", "exemplar", "local", "flipout", "shared")):
            raise ValueError(f"estimator must be one of {list(kinds)}, but it is {self.estimator!r}.")
        if self.prior_std is None and not self.weight_decay > 0:
            raise ValueError("A Gaussian prior needs a width: give prior_std, or a weight_decay above 0.")
        if self.prior_std is not None and not 0 < self.prior_std < math.inf:
            raise ValueError(f"prior_std must be positive and finite, but it is {self.prior_std}.")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, but it is {self.temperature}.")

    @classmethod
    def example(cls) -> BayesAdapter:
        """Return a short run that starts wider, for a small network and little data."""
        return cls(epochs=10, start_std=(0.05, 0.06), lr=0.01, log_std_lr=0.05)

    @classmethod
    def retrained(cls, **settings: Any) -> BayesAdapter:
        """Return means that are trained on at training rates, under a cold posterior.

        At temperature 1 each weight that the data determine may cost half a nat of all data: wide noise that a network
        does not survive. Several of these, from other seeds, are members: `fit_members`.

        Args:
            settings: Others than these.

        Example:
            >>> BayesAdapter.retrained(epochs=5).temperature
            0.05
        """
        chosen: dict[str, Any] = {
            "lr": 0.05, "schedule": "cosine", "epochs": 10, "temperature": 0.05, "start_std": (0.005, 0.01),
            "weight_decay": 5e-4,
        }  # fmt: skip
        return cls(**{**chosen, **settings})

    # -- building -------------------------------------------------------------------------------------------------

    def build(self, network: nn.Module, selection: Selection) -> tuple[GaussianLaw, Conversion]:
        """Take the weights as means."""
        names, table = select_parameters(network, selection, how="Gaussian")
        require_something(table, network, "BayesAdapter", "parameters that are not frozen")
        generator = torch.Generator().manual_seed(self.seed)
        log_stds = {name: self._log_std(network.get_parameter(name), generator) for name in names}
        for name, module in network.named_modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                known = log_stds.get(f"{name}.weight" if name else "weight")
                if known is not None:  # the vector of padding is a constant, not a weight
                    known.data[module.padding_idx] = -math.inf
        means = {name: network.get_parameter(name).detach().clone() for name in names}
        law = GaussianLaw(
            network,
            log_stds=log_stds,
            prior_means=means if self.prior == "pretrained" else None,
            estimator=self.estimator,
            keep_statistics=self.statistics == "frozen",
        )
        return law, table

    def _log_std(self, parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
        low, high = (math.log(std) if std > 0 else -math.inf for std in self.start_std)
        # Half precision is too coarse for logarithms that change by thousandths.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        log_std = torch.rand(parameter.shape, generator=generator, dtype=dtype)
        log_std = torch.full_like(log_std, low) if low == high else low + (high - low) * log_std
        return nn.Parameter(log_std.to(parameter.device))

    # -- learning -------------------------------------------------------------------------------------------------

    @property
    def learns_by_loss(self) -> bool:
        """Whether the prior is in the loss, and not built into the optimiser."""
        return self.prior_gradient == "autograd" or self.temperature == 0

    def std_of_prior(self, num_data: int) -> float:
        """Return the prior's standard deviation for n training examples.

        >>> round(BayesAdapter(weight_decay=2e-4).std_of_prior(50_000) ** 2, 3)
        0.1
        """
        return self.prior_std if self.prior_std is not None else (self.weight_decay * num_data) ** -0.5

    def terms(self, posterior: Posterior, outputs: Tensor, targets: Any, num_data: int) -> LossTerms:
        """Return the mean negative log-likelihood, and KL/n unless its gradient is built into the optimiser."""
        terms = super().terms(posterior, outputs, targets, num_data)
        if self.prior_gradient == "autograd" and self.temperature > 0:
            terms["kl"] = self.temperature * _law(posterior).kl(self.std_of_prior(num_data)) / num_data
        return terms

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage with two groups: the means and all else, and psi at a rate of its own."""
        log_stds = list(_law(posterior).log_std.parameters())
        known = {id(parameter) for parameter in log_stds}
        others = [p for p in posterior.parameters() if p.requires_grad and id(p) not in known]
        groups = [
            {"params": others, "lr": self.lr, "name": "means"},
            {"params": log_stds, "lr": self.log_std_lr, "name": _LOG_STDS},
        ]
        return [Stage(self.name, groups)]

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return SGD with Nesterov momentum .9, or Adam, without weight decay."""
        if self.optimizer == "adam":
            return torch.optim.Adam(groups, lr=self.lr)
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9, nesterov=True)

    def prepare_optimizer(self, posterior: Posterior, optimizer: Optimizer, num_data: int) -> None:
        """Refuse weight decay, and build the prior's gradient in if asked.

        In a loop of your own `Learner.optimizer` calls it.
        """
        decays = {group["weight_decay"] for group in optimizer.param_groups if group.get("weight_decay")}
        if decays:
            raise ValueError(
                f"The optimiser has weight_decay={decays.pop()}, and the prior, KL/n in the loss, is the weight decay "
                "already: both would pull the means twice and the log standard deviations to zero. Use "
                f"{type(optimizer).__name__}(..., weight_decay=0), and BayesAdapter(weight_decay=...) for the prior."
            )
        if self.prior_gradient == "built-in" and self.temperature > 0:
            constants = _constants(_law(posterior))
            optimizer.register_step_pre_hook(lambda *_: self.add_prior_gradient(posterior, num_data, constants))

    @torch.no_grad()
    def add_prior_gradient(
        self, posterior: Posterior, num_data: int, constants: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add the gradient of temperature KL/n: lambda (mu - m) to the means', lambda exp(2 psi) - 1/n to psi's.

        lambda = 1 / (n prior_std^2) is the weight decay.

        Args:
            posterior: The posterior, with gradients.
            num_data: The number n of training examples.
            constants: Where parameters are not random, by name; None looks.
        """
        law = _law(posterior)
        constants = _constants(law) if constants is None else constants
        decay = self.temperature / (num_data * self.std_of_prior(num_data) ** 2)
        centres, widths = law.prior_mean.as_dict(), law.prior_log_std.as_dict()
        for name, log_std in law.log_std.as_dict().items():
            mean = law.tensor(name)
            away = mean - centres[name] if centres else mean
            own = self.temperature / num_data * (-2 * widths[name]).exp() if widths else decay
            push = (2 * log_std).exp_().mul_(own).sub_(self.temperature / num_data)
            if name in constants:
                away = away.masked_fill(constants[name], 0)
                push = push.masked_fill_(constants[name], 0)
            _add_gradient(mean, away * own if widths else away, 1.0 if widths else decay)
            _add_gradient(log_std, push, 1.0)

    def make_schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Return a schedule with psi's own rate."""
        named = [group.get("name") == _LOG_STDS for group in optimizer.param_groups]
        kinds = [self.log_std_schedule if own else self.schedule for own in named]
        return LambdaLR(
            optimizer, [_steps(total_steps) if kind == "steps" else rate_factor(kind, total_steps) for kind in kinds]
        )


def _law(posterior: Posterior) -> GaussianLaw:
    return cast(GaussianLaw, posterior.law)


def _steps(total_steps: int) -> Callable[[int], float]:
    """Return a rate's factor that falls to a fifth after each quarter of the run."""
    total = max(total_steps, 1)
    return lambda step: 0.2 ** min(3, 4 * step // total)


def _constants(law: GaussianLaw) -> dict[str, Tensor]:
    """Return where parameters are not random, for those that have such entries."""
    masks = {name: tensor_of(law.log_std, name) == -math.inf for name in law.names}
    return {name: mask for name, mask in masks.items() if bool(mask.any())}


def _add_gradient(parameter: Tensor, change: Tensor, factor: float) -> None:
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = (factor * change).to(parameter.dtype)
    else:
        parameter.grad.add_(change, alpha=factor)
