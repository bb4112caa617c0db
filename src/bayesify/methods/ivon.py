"""IVON: Gaussian weights by an optimiser of the shape of Adam's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify.laws import GaussianLaw, LossTerms, Posterior
from bayesify.methods.method import Method, Stage, register
from bayesify.selection import Conversion, Selection, require_something, select_parameters

__all__ = ["IVON", "VariationalNewton"]


@register
@dataclass(frozen=True, kw_only=True)
class IVON(Method):
    """Learn Gaussian weights by improved variational online Newton (Shen et al. 2024).

    Minimises E_q[mean NLL + delta/2 |w|^2] - H(q)/lambda over q(w) = N(m, diag sigma^2), by natural gradients with
    momentum; see `VariationalNewton`. That is the negative ELBO over n, for lambda = n and the prior N(0, 1/(n delta)).
    A step costs one of plain training, a normal number for each weight, and the backward pass to sigma; prediction
    costs a plain pass per draw.

    Attributes:
        start_std: Where sigma starts; 0 has no noise, and cannot be fitted. The paper starts at a curvature h0, which
            is 1/(lambda start_std^2) - delta.
        ess: The effective sample size lambda; None takes the number n of training examples.
        temperature: Divides lambda; below 1 the posterior is colder than Bayes' rule has it.
        weight_decay: delta, the precision of the prior divided by lambda.
        lr: Step size of the means as SGD has it: the paper's is lr (h0 + delta).
        beta1: How much of the momentum a step keeps.
        beta2: How much of the curvature a step keeps. A run should have several times 1/(1 - beta2) steps.
        mc_samples: Draws in a step, each a pass.
        clip_radius: Bounds each entry of a Newton step, before it is multiplied by the paper's rate; None bounds none.
        statistics: "frozen" normalises by the running statistics in training too and keeps them, so that what is
            trained is what predicts; "updated" trains with the statistics of each batch, which are those of one draw,
            and updates the running ones.
    """

    name = "ivon"
    if_worse = "Lower the learning rate or start_std, or fit for more epochs."

    start_std: float = 0.005
    ess: float | None = None
    temperature: float = 1.0
    weight_decay: float = 2e-4
    epochs: int = 20
    lr: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.9995
    mc_samples: int = 1
    clip_radius: float | None = None
    statistics: Literal["updated", "frozen"] = "frozen"

    def __post_init__(self) -> None:
        """Check the settings."""
        if not 0 <= self.start_std < math.inf:
            raise ValueError(f"start_std must be a finite number of at least 0, but it is {self.start_std}.")
        for name in ("ess", "temperature", "weight_decay", "clip_radius"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, but it is {value}.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, but it is {getattr(self, name)}.")
        if self.mc_samples < 1:
            raise ValueError(f"mc_samples must be at least 1, but it is {self.mc_samples}.")
        if self.statistics not in ("updated", "frozen"):
            raise ValueError(f"statistics must be 'updated' or 'frozen', but it is {self.statistics!r}.")

    @classmethod
    def example(cls) -> IVON:
        """Return a short run that starts wider, for a small network and little data."""
        return cls(epochs=10, start_std=0.06, lr=0.1, beta2=0.999)

    # -- building -------------------------------------------------------------------------------------------------

    def build(self, network: nn.Module, selection: Selection) -> tuple[GaussianLaw, Conversion]:
        """Take the weights as means."""
        names, table = select_parameters(network, selection, how="Gaussian")
        require_something(table, network, "IVON", "parameters that are not frozen")
        log_stds = {name: self._log_std(network.get_parameter(name)) for name in names}
        for name, module in network.named_modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                known = log_stds.get(f"{name}.weight" if name else "weight")
                if known is not None:  # the vector of padding is a constant, not a weight
                    known.data[module.padding_idx] = -math.inf
        keep = self.statistics == "frozen"
        return GaussianLaw(network, log_stds=log_stds, estimator="shared", keep_statistics=keep), table

    def _log_std(self, parameter: Tensor) -> nn.Parameter:
        # Half precision is too coarse for logarithms that change by thousandths.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        start = math.log(self.start_std) if self.start_std > 0 else -math.inf
        return nn.Parameter(torch.full_like(parameter, start, dtype=dtype))

    # -- learning -------------------------------------------------------------------------------------------------

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the mean negative log-likelihood over draws; the prior and the entropy are the optimiser's."""
        draws = [super(IVON, self).objective(posterior, inputs, targets, num_data) for _ in range(self.mc_samples)]
        return LossTerms({name: torch.stack([terms[name] for terms in draws]).mean() for name in draws[0]})

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage: the random weights, and all else, which is trained without noise or prior."""
        log_stds = cast(GaussianLaw, posterior.law).log_std.as_dict()
        random = [*(posterior.network.get_parameter(name) for name in log_stds), *log_stds.values()]
        known = {id(parameter) for parameter in random}
        others = [p for p in posterior.parameters() if p.requires_grad and id(p) not in known]
        groups: list[dict[str, Any]] = [{"params": random}]
        return [Stage(self.name, [*groups, {"params": others, "random": False}] if others else groups)]

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the optimiser that is the method."""
        return VariationalNewton(
            groups,
            lr=self.lr,
            start_std=self.start_std,
            weight_decay=self.weight_decay,
            betas=(self.beta1, self.beta2),
            clip_radius=self.clip_radius,
        )

    def prepare_optimizer(self, posterior: Posterior, optimizer: Optimizer, num_data: int) -> None:
        """Tell the optimiser the effective sample size.

        In a loop of your own `Learner.optimizer` calls it.
        """
        if not isinstance(optimizer, VariationalNewton):
            raise ValueError(
                f"IVON is an optimiser itself, and {type(optimizer).__name__} cannot stand in for it. Leave out "
                "fit(optimizer=...), or use BayesAdapter, which learns the same distribution with any optimiser."
            )
        if self.start_std == 0:
            raise ValueError("start_std=0 has no noise, and IVON learns from noise. Give a start_std above 0.")
        for group in optimizer.param_groups:
            group["ess"] = (num_data if self.ess is None else self.ess) / self.temperature
        law = cast(GaussianLaw, posterior.law)
        centres, widths = law.prior_mean.as_dict(), law.prior_log_std.as_dict()
        optimizer.prior = {law.tensor(name): (centres[name], widths[name]) for name in widths}


class VariationalNewton(Optimizer):
    """Algorithm 1 of Shen et al. (2024), for gradients of a loss at weights w = m + exp(psi) e that were drawn.

    With sigma^2 = exp(2 psi) = 1/(lambda (h + delta)), a step is

    - g <- beta1 g + (1 - beta1) ghat, where ghat is the gradient at w, which is that of m;
    - h <- beta2 h + (1 - beta2) hhat + (1 - beta2)^2/2 (h - hhat)^2/(h + delta), with hhat = ghat (w - m)/sigma^2;
    - m <- m - lr (h0 + delta) (g/(1 - beta1^t) + delta m)/(h + delta).

    The gradient of psi is ghat (w - m), so hhat is that over sigma^2. As all is linear in gradients, those of several
    draws, batches or processes are averaged as ever. In terms of psi, which is the only place where h is kept,

        psi <- psi - ln(1 + u + u^2/2)/2,  u = (1 - beta2) (lambda (grad psi + delta exp(2 psi)) - 1).

    Weights with psi = -inf are constants and stay as they are.

    Args:
        groups: Parameter groups: all means, then all psi in the same order. Those with `random=False` hold other
            parameters w, with w <- w - lr g/(1 - beta1^t).
        lr: Step size.
        start_std: The sigma of h0.
        weight_decay: delta.
        betas: beta1 and beta2.
        clip_radius: Bounds the entries of (g/(1 - beta1^t) + delta m)/(h + delta).
        ess: lambda, which may be set in the groups before the first step.

    Attributes:
        prior: Mean and ln of the standard deviation of the prior, by the weight, where it is another than the one of
            `weight_decay`; delta is then 1/(lambda variance) and m in the last step the difference to that mean.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        start_std: float,
        weight_decay: float,
        betas: tuple[float, float],
        clip_radius: float | None = None,
        ess: float | None = None,
    ) -> None:
        known = {"lr": lr, "start_std": start_std, "weight_decay": weight_decay, "betas": betas, "random": True}
        super().__init__(groups, {**known, "clip_radius": clip_radius, "ess": ess})
        self.prior: dict[Tensor, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["random"]:
                for weight in (weight for weight in group["params"] if weight.grad is not None):
                    weight.sub_(self._momentum(weight, group), alpha=group["lr"])
                continue
            if group["ess"] is None:
                raise ValueError(
                    "The number of data is unknown. Take the optimiser from a learner, which knows it: "
                    "bayesify.Learner(objective, ...).optimizer()."
                )
            half = len(group["params"]) // 2
            for mean, log_std in zip(group["params"][:half], group["params"][half:], strict=True):
                if mean.grad is not None:
                    self._move(mean, log_std, group)
        return loss

    def _move(self, mean: Tensor, log_std: Tensor, group: dict[str, Any]) -> None:
        if log_std.grad is None:
            raise ValueError("The loss is that of a pass without noise. Compute it outside of posterior.mean().")
        ess, radius = group["ess"], group["clip_radius"]
        decay: Tensor | float = group["weight_decay"]
        centre: Tensor | float = 0.0
        if mean in self.prior:
            centre, width = self.prior[mean]
            decay = (-2 * width).exp() / ess
        pull = ess * (log_std.grad + decay * (2 * log_std).exp()) - 1
        change = (1 - group["betas"][1]) * pull
        log_std.sub_(torch.log1p(change + change**2 / 2), alpha=0.5)
        newton = ess * (2 * log_std).exp() * (self._momentum(mean, group) + decay * (mean - centre))
        if radius is not None:
            newton.clamp_(-radius, radius)
        mean.sub_(newton, alpha=group["lr"] / (ess * group["start_std"] ** 2))

    def _momentum(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the average gradient, corrected for its start at zero."""
        assert weight.grad is not None
        state, keep = self.state[weight], group["betas"][0]
        if not state:
            state.update(step=0, momentum=torch.zeros_like(weight))
        state["step"] += 1
        average: Tensor = state["momentum"].lerp_(weight.grad, 1 - keep)
        return average.div(1 - keep ** int(state["step"]))
