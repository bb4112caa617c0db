"""iBNN: a mixture posterior over layer inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bayesify._core.trees import batch_rows, repeat_rows
from bayesify.laws import InputFactorLaw, LossTerms, Pass, Posterior
from bayesify.laws.input_factors.kl import Divergence
from bayesify.laws.input_factors.latents import is_attention, why_not
from bayesify.laws.input_factors.law import inverse_softplus
from bayesify.layers import LinearLayer, register_by_old_name
from bayesify.methods.method import Method, Schedule, Stage, rate_factor, register
from bayesify.selection import Conversion, Selection, require_something, select_modules

__all__ = ["IBNN"]

_LATENTS = "latents"


@register
@dataclass(frozen=True, kw_only=True)
class IBNN(Method):
    """Multiply the inputs of layers by noise from a mixture of K Gaussians (Trinh et al. 2020).

    A layer computes U (z o x) + b, z ~ (1/K) sum_k N(m_k, s_k^2) with one component for the whole network, U and b
    deterministic. Minimises mean NLL + beta KL(q || p) / n with the prior N(1, prior_std^2) on each factor. A step
    costs S plain ones and an elementwise product in front of each layer; a prediction K L plain passes, since a draw
    folds into the weights; memory is that of the network and of 2 K numbers for each input.

    Attributes:
        components: K.
        draws_per_component: How many draws L of each component a prediction takes, if the caller does not say.
        repeats: How often each example is in a training pass, S, each time with new noise.
        assign: Which components these copies have: "consecutive" ones (the authors' code), or the "same" (their
            Algorithm 1). Every component gets as many rows as the others, to one; to S where they have the same.
        means_std: The means start as N(1, means_std^2): what makes components differ. The paper has .5 and .75 for
            training from scratch, which a pretrained network does not survive.
        start_std: The standard deviations start as |N(a, b^2)| for these two.
        prior_std: Of the prior.
        kl: "mean" is the paper's surrogate, "average" a bound within ln K nats, "mc" an unbiased estimate; see
            `laws/input_factors/kl.py`.
        beta: What KL/n is multiplied by in the end.
        anneal: The part of the run over which beta grows from 0, step by step. A loop of your own needs a `Learner`,
            which counts the steps, or 0 here.
        weights: How U, b and all other parameters learn: "slow", at `slow_lr`; "joint", at `lr`; "frozen".
        lr: Of the weights, if they learn jointly.
        slow_lr: Of the weights, if they are to stay near where they are.
        latent_lr: Of means and standard deviations. SGD takes K latent_lr: each component sees one row in K, so that
            its gradient is K times smaller than that of a single one. Adam, which does not see the size of gradients,
            takes latent_lr itself.
        latent_schedule: Of that rate; `schedule` is that of the weights.
        weight_decay: Of the weights, never of means and standard deviations.
        bias: Multiply each bias by a factor too.
        seed: Of the start of means and standard deviations.
    """

    name = "ibnn"
    renamed: ClassVar[dict[str, str]] = {**Method.renamed, "samples": "draws_per_component"}

    components: int = 4
    draws_per_component: int = 5
    repeats: int = 2
    assign: Literal["consecutive", "same"] = "consecutive"
    means_std: float = 0.05
    start_std: tuple[float, float] = (0.05, 0.02)
    prior_std: float = 0.1
    kl: Divergence = "mean"
    beta: float = 1.0
    anneal: float = 2 / 3
    weights: Literal["slow", "joint", "frozen"] = "slow"
    epochs: int = 15
    lr: float = 0.05
    slow_lr: float = 1e-4
    latent_lr: float = 0.0125
    latent_schedule: Schedule = "constant"
    schedule: Schedule = "held"
    weight_decay: float = 5e-4
    bias: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("components", "draws_per_component", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        if self.means_std < 0 or min(self.start_std) < 0 or len(self.start_std) != 2:
            raise ValueError(
                "means_std is a standard deviation and start_std a pair of them, none below 0, but they are "
                f"{self.means_std} and {self.start_std}."
            )
        if not 0 < self.prior_std < math.inf:
            raise ValueError(f"prior_std must be positive and finite, but it is {self.prior_std}.")
        if self.beta < 0 or not 0 <= self.anneal <= 1:
            raise ValueError(
                f"beta is at least 0 and anneal a part of the run, but they are {self.beta}, {self.anneal}."
            )
        choices: dict[str, tuple[str, ...]] = {
            "assign": ("consecutive", "same"),
            "kl": ("mean", "average", "mc"),
            "weights": ("slow", "joint", "frozen"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {list(allowed)}, but it is {getattr(self, name)!r}.")

    @classmethod
    def example(cls) -> IBNN:
        """Return a configuration that is quick on little data."""
        return cls(epochs=10, means_std=0.25, start_std=(0.2, 0.08), repeats=1, weights="joint", lr=0.01)

    @classmethod
    def from_scratch(cls, components: int = 8, **settings: Any) -> IBNN:
        """Return the paper's settings for networks without trained weights (section 3.3, VGG-16 on CIFAR-10)."""
        paper: dict[str, Any] = {
            "weights": "joint", "lr": 0.05, "latent_lr": 0.15, "means_std": 0.75, "prior_std": 0.3, "epochs": 300,
        }  # fmt: skip
        return cls(components=components, **{**paper, **settings})

    @classmethod
    def retrained(cls, components: int = 4, **settings: Any) -> IBNN:
        """Return a trained network's weights and factors, trained on together at training rates.

        Components start far apart, which a network survives whose weights may follow, and which frozen or slow ones
        do not.

        Args:
            components: K.
            settings: Others than these.

        Example:
            >>> IBNN.retrained(2, epochs=5).weights
            'joint'
        """
        chosen: dict[str, Any] = {
            "weights": "joint", "lr": 0.05, "latent_lr": 0.05, "means_std": 0.3, "prior_std": 0.3, "epochs": 12,
            "draws_per_component": 1,
        }  # fmt: skip
        return cls(components=components, **{**chosen, **settings})

    @classmethod
    def register_type(cls, kind: type[nn.Module], *, dim: int = -1, weight_dim: int = 1) -> None:
        """Make a type known; the name is old, see `bayesify.register_type`."""
        register_by_old_name("IBNN.register_type", kind, LinearLayer(dim, weight_dim))

    # -- building -------------------------------------------------------------------------------------------------

    def build(self, network: nn.Module, selection: Selection) -> tuple[InputFactorLaw, Conversion]:
        """Give the inputs of the wanted layers factors, and these their start."""
        table = self._table(network, selection)
        if self.weights == "frozen":
            network.requires_grad_(False)
        law = InputFactorLaw(network, modules=table.converted, components=self.components, bias=self.bias)
        generator = torch.Generator().manual_seed(self.seed)
        means = law.component_means

        def normal(centre: float, std: float) -> Tensor:
            return centre + std * torch.randn(means.shape, generator=generator, dtype=means.dtype)

        with torch.no_grad():
            means.copy_(normal(1.0, self.means_std))
            law.component_rhos.copy_(inverse_softplus(normal(*self.start_std).abs()))
        law.default_draws = self.components * self.draws_per_component
        return law, table

    def state(self, posterior: Posterior) -> nn.Module:
        """Return what the divergence is multiplied by now."""
        law = cast(InputFactorLaw, posterior.law)
        return Annealing(law.component_means.detach(), 0.0 if self.anneal else self.beta)

    def learning(self, posterior: Posterior) -> Any:
        """Return it; for a posterior that was loaded, what the divergence is multiplied by in the end."""
        loaded = posterior.learning is None
        found = super().learning(posterior)
        if loaded:
            found.kl_weight.fill_(self.beta)
        return found

    def _table(self, network: nn.Module, selection: Selection) -> Conversion:
        projections = {id(m.out_proj) for m in network.modules() if is_attention(m)}

        def decide(name: str, module: nn.Module) -> tuple[bool, str] | None:
            del name
            reason = why_not(module, in_attention=id(module) in projections)
            if reason is None:
                return True, f"inputs with {self.components} components"
            return (False, reason) if next(module.parameters(recurse=False), None) is not None else None

        found = select_modules(network, decide, selection)
        require_something(found, network, "IBNN", "linear layers, convolutions, embeddings or attention")
        _check_sharing(network, found)
        return found

    # -- learning -------------------------------------------------------------------------------------------------

    @property
    def learns_by_loss(self) -> bool:
        """Whether beta is constant."""
        return not self.anneal

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the mean over S copies of each example, each with its own noise, and the divergence.

        Each copy of the batch is a pass of its own, which a processor's cache likes better than one of S B rows, and
        has rows of every component: batch normalisation sees B examples of the mixture. Where a weight is read outside
        its layer, which its rows must share, a pass has one component, and the copies' passes consecutive ones.
        """
        present = posterior.present()
        if present.kind != "fresh":  # copies of a row in one function would be the same
            return super().objective(posterior, inputs, targets, num_data)
        law, repeats = cast(InputFactorLaw, posterior.law), self.repeats
        rows, same, trace = batch_rows(inputs), self.assign == "same", posterior.trace(inputs)
        components = law.assign(rows, repeats, same=same, trace=trace).view(repeats, -1)
        chosen = [own if present.part is None else present.part for own in components]
        outputs = [posterior.outputs(inputs, Pass(part=part)) for part in chosen]
        return self.terms(posterior, torch.cat(outputs), repeat_rows(targets, repeats), num_data)

    def terms(self, posterior: Posterior, outputs: Tensor, targets: Any, num_data: int) -> LossTerms:
        """Return the mean negative log-likelihood, and beta KL/n."""
        terms = super().terms(posterior, outputs, targets, num_data)
        divergence = cast(InputFactorLaw, posterior.law).kl(self.prior_std, self.kl)
        terms["kl"] = self.learning(posterior).kl_weight * divergence / num_data
        return terms

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage with groups: the weights, means and standard deviations, and the likelihood's own."""
        law = cast(InputFactorLaw, posterior.law)
        lr = self.lr if self.weights == "joint" else self.slow_lr
        latents = [law.component_means, law.component_rhos]
        latent_lr = self.latent_lr * (self.components if self.optimizer == "sgd" else 1)
        groups: list[dict[str, Any]] = [
            {"params": list(posterior.network.parameters()), "lr": lr, "name": "weights"},
            {"params": latents, "lr": latent_lr, "weight_decay": 0.0, "name": _LATENTS},
            {
                "params": list(posterior.likelihood.parameters()),
                "lr": self.lr,
                "weight_decay": 0.0,
                "name": "likelihood",
            },
        ]
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        return [Stage(self.name, [group for group in groups if group["params"]])]

    def make_schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Return a schedule in which means and standard deviations have their own."""
        named = [group.get("name") == _LATENTS for group in optimizer.param_groups]
        kinds = [self.latent_schedule if own else self.schedule for own in named]
        return LambdaLR(optimizer, [rate_factor(kind, total_steps) for kind in kinds])

    def after_step(self, posterior: Posterior, step: int, total_steps: int, steps_per_epoch: int) -> None:
        """Let beta grow from 0, over `anneal` of the run."""
        del steps_per_epoch
        length = self.anneal * total_steps
        self.learning(posterior).kl_weight.fill_(self.beta * (min(1.0, step / length) if length else 1.0))


class Annealing(nn.Module):
    """What the divergence is multiplied by now."""

    kl_weight: Tensor

    def __init__(self, like: Tensor, weight: float) -> None:
        super().__init__()
        self.register_buffer("kl_weight", like.new_full((), weight))


def _check_sharing(network: nn.Module, table: Conversion) -> None:
    """Raise if a module that is not converted shares a weight with one that is."""
    reasons = {row.name: row.reason for row in table.rows if not row.converted}
    taken: dict[int, str] = {}
    for name in table.converted:
        for key, parameter in network.get_submodule(name).named_parameters(recurse=False):
            taken[id(parameter)] = f"{name}.{key}" if name else key
    for name, reason in reasons.items():
        for key, parameter in network.get_submodule(name).named_parameters(recurse=False):
            if id(parameter) in taken and "bias" not in key:
                raise ValueError(
                    f"Module {name!r} ({reason}) shares {taken[id(parameter)]!r} with a module that is converted, and "
                    "a weight cannot be both. Convert both modules, or neither."
                )
