"""Langevin sampling: SGLD, SGHMC and preconditioned SGLD."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bayesify.laws import STORAGE, BankLaw, LossTerms, Posterior
from bayesify.laws.bank import Storage, check_storage
from bayesify.methods.chains import Chains
from bayesify.methods.deep_ensemble import Start, start_member
from bayesify.methods.gradient_noise import TOLERATED, Correction, GradientNoise
from bayesify.methods.langevin import Kind, Langevin
from bayesify.methods.method import Method, Stage, register
from bayesify.selection import Conversion, Selection, require_something, select_parameters

__all__ = ["SGLD"]

TRIAL = 100
# Step sizes at which a posterior that is known exactly has standard deviations within a few per cent.
RATES: dict[str, float] = {"psgld": 0.002}


@register
@dataclass(frozen=True, kw_only=True)
class SGLD(Method):
    """Samples of the weights by stochastic gradient Langevin dynamics (Welling and Teh 2011).

    A step is w <- w - lr/2 (grad of the mean loss + w/(n prior_std^2)) + N(0, T lr/n), whose stationary distribution is
    the posterior at temperature T, up to the gradients' noise and O(lr). After the burn-in, states at equal
    distances of sum lr are kept, so that decreasing steps need no weights. Fitting costs the epochs of plain training
    for each chain, each step about half more for the noise; prediction a plain pass per sample.

    Weights that the data leave open relax in 2/(lr weight_decay) steps: a burn-in that is shorter gets a warning. So do
    minibatches whose gradients' noise has more than a tenth of the variance of the injected noise.

    Attributes:
        kind: "sgld", "sghmc" (with momentum) or "psgld" (preconditioned in the burn-in, constant afterwards).
        samples_per_chain: How many samples of each chain are kept.
        chains: How many chains run.
        together: Whether the chains move together, step by step, on the same minibatches: vectorised in networks of
            linear layers. Otherwise they run one after another, each with its own order of the data.
        start: Of the chains: from the "network", "perturbed", or "reset" to new weights.
        perturb_std: Standard deviation of the noise of "perturbed", relative to each tensor's root mean square.
        burn_in: Share of the run before the first sample.
        thin: Steps between samples, counted from the end of the run; None spreads them over all that is left.
        temperature: 1 samples the posterior; less is a cold one.
        prior_std: Of the Gaussian prior; None takes 1/sqrt(n weight_decay).
        schedule: "constant"; "polynomial", lr (1 + t/decay_steps)^-decay; "cyclical", `cycles` half cosines, of which
            samples are taken after the share `exploration` (Zhang et al. 2020).
        friction: Of "sghmc"; 1 is "sgld".
        correction: Take the minibatches' noise off the injected one, weight by weight, as far as there is any:
            "shuffled" for minibatches that are the parts of an epoch in which every example comes once,
            "independent" for those drawn with replacement. The first is not known for "sghmc".
        decay: The exponent of "polynomial".
        decay_steps: The unit of time of "polynomial".
        cycles: How many "cyclical" has.
        exploration: Share of each cycle before its first sample.
        lr: Step size; None takes .2, and .002 for "psgld", whose steps are lr divided by the gradients' size.
        storage: Type of the stored samples, "float32", "bfloat16" or "float16"; None takes the parameters' own.
        statistics_batches: How many batches re-estimate batch-normalisation statistics of a sample; None takes all.
        seed: Of the chains' starts; the noise's is `fit`'s.
    """

    name = "sgld"
    renamed: ClassVar[dict[str, str]] = {**Method.renamed, "num_samples": "samples_per_chain"}
    trains_draws = False
    trains_in_parts = False

    kind: Kind = "sgld"
    samples_per_chain: int = 100
    chains: int = 1
    together: bool = False
    start: Start = "network"
    perturb_std: float = 0.1
    burn_in: float = 0.5
    thin: int | None = None
    temperature: float = 1.0
    prior_std: float | None = None
    friction: float = 0.1
    correction: Correction | None = None
    decay: float = 0.55
    decay_steps: int = 1000
    cycles: int = 4
    exploration: float = 0.5
    storage: Storage | None = None
    statistics_batches: int | None = 50
    seed: int = 0
    epochs: int = 100
    lr: float = None  # type: ignore[assignment]
    weight_decay: float = 1e-3
    schedule: Literal["constant", "polynomial", "cyclical"] = "constant"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.lr is None:
            object.__setattr__(self, "lr", RATES.get(self.kind, 0.2))
        if self.correction not in (None, "shuffled", "independent"):
            raise ValueError(f"correction must be 'shuffled', 'independent' or None, but it is {self.correction!r}.")
        if self.correction == "shuffled" and self.kind == "sghmc":
            raise ValueError(
                "How much of the noise of a shuffled epoch cancels is not known for 'sghmc'. Draw minibatches with "
                "replacement, for which correction='independent' is right, or choose a smaller lr."
            )
        for name in ("samples_per_chain", "chains", "cycles", "decay_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        for name in ("burn_in", "exploration"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a share of the steps, at least 0 and below 1, not {getattr(self, name)}.")
        if self.thin is not None and self.thin < 1:
            raise ValueError(f"thin is a number of steps, at least 1, but it is {self.thin}.")
        if self.temperature < 0 or not 0 < self.friction <= 1:
            raise ValueError("temperature must be at least 0, and friction above 0 and at most 1.")
        if self.prior_std is not None and self.prior_std <= 0:
            raise ValueError(f"prior_std must be above 0, but it is {self.prior_std}.")
        check_storage(self.storage)
        if self.schedule not in ("constant", "polynomial", "cyclical"):
            raise ValueError(f"schedule must be 'constant', 'polynomial' or 'cyclical', but it is {self.schedule!r}.")

    @classmethod
    def example(cls) -> SGLD:
        """Return a short, cold run around the trained network, the best of some on the demo's validation digits.

        A few hundred data say next to nothing about tens of thousands of weights: at temperature 1 a network that was
        trained on them is lost among those that were not. `fit` warns that the run is short for its prior.
        """
        return cls(**cls.example_settings())

    @classmethod
    def cyclical(cls, cycles: int = 3, **settings: Any) -> SGLD:
        """Return cyclical SGHMC from the network: a cold chain whose sample of each cycle is its end (Zhang et al.).

        With momentum and lr .2 its steps are those of SGD with Nesterov's rate .1. `temperature=0` takes the noise
        away: what is left are snapshots of the same cost (Huang et al. 2017).

        Args:
            cycles: How many, with one sample each.
            settings: Others than these.

        Example:
            >>> from bayesify.methods.sgld import sample_steps
            >>> sorted(sample_steps(SGLD.cyclical(3), 30))
            [10, 20, 30]
        """
        chosen: dict[str, Any] = {
            "kind": "sghmc", "schedule": "cyclical", "samples_per_chain": cycles, "burn_in": 0.0, "temperature": 0.05,
            "weight_decay": 5e-4, "epochs": 4 * cycles,
        }  # fmt: skip
        return cls(cycles=cycles, **{**chosen, **settings})

    @staticmethod
    def example_settings() -> dict[str, Any]:
        """Return the settings of a short run."""
        chain = {"epochs": 40, "samples_per_chain": 20, "lr": 0.05, "prior_std": 0.5, "temperature": 0.01}
        return {**chain, "statistics_batches": 10}

    # -- building -----------------------------------------------------------------------------------------------

    def build(self, network: nn.Module, selection: Selection) -> tuple[BankLaw, Conversion]:
        """Make room for the samples."""
        size = self.chains * self.samples_per_chain
        names, table = select_parameters(network, selection, how=f"{self.kind}, {size} samples")
        require_something(table, network, "SGLD", "parameters that are not frozen")
        dtype = STORAGE[self.storage] if self.storage else None
        return BankLaw(network, names=names, size=size, groups=self.chains, dtype=dtype, source=self.name), table

    def state(self, posterior: Posterior) -> nn.Module:
        """Return the chains: at their starts, or where the last samples are."""
        law = cast(BankLaw, posterior.law)
        starts = self.chain_starts(posterior.network, list(law.names))
        last = [law.codec.split(law.samples[rows[-1]].to(law.codec.dtype)) if rows else {} for rows in law.chain_rows()]
        return Chains([{**start, **own} for start, own in zip(starts, last, strict=True)], law.names)

    def chain_starts(self, network: nn.Module, names: list[str]) -> list[dict[str, Tensor]]:
        """Return what each chain begins with, by name."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return [start_member(network, names, self.start, self.perturb_std) for _ in range(self.chains)]

    # -- learning -----------------------------------------------------------------------------------------------

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return the mean negative log-likelihood; the prior is the sampler's."""
        self.data_count(posterior).fill_(num_data)
        learning: Chains = self.learning(posterior)
        if self.together and posterior.present_part is None:
            return self.joint_objective(posterior, learning.all_outputs(posterior, inputs), targets)
        outputs = self.outputs(posterior, inputs)
        if learning.meter is not None and _rows_match(outputs, targets):
            learning.meter.look(
                lambda some: self.terms(posterior, outputs[some], targets[some], num_data).total,
                len(outputs),
                learning.chains[posterior.present_part or 0].parameters(),
            )
        return self.terms(posterior, outputs, targets, num_data)

    def joint_objective(self, posterior: Posterior, outputs: Tensor, targets: Any) -> LossTerms:
        """Return the mean loss of the outputs of all chains, (C, B, ...), and look at the noise of its gradients."""
        learning: Chains = self.learning(posterior)
        if learning.meter is not None and _rows_match(outputs[0], targets):
            learning.meter.look(
                lambda some: self.mean_over_chains(posterior, outputs[:, some], targets[some]).total,
                outputs.shape[1],
                learning.chains.parameters(),
            )
        return self.mean_over_chains(posterior, outputs, targets)

    def mean_over_chains(self, posterior: Posterior, outputs: Tensor, targets: Any) -> LossTerms:
        """Return the mean over chains of the loss of their outputs, (C, B, ...)."""
        return LossTerms(nll=torch.stack([posterior.likelihood.nll(some, targets) for some in outputs]).mean())

    def outputs(self, posterior: Posterior, inputs: Any, *, ood_rows: int = 0) -> Tensor:
        """Return the outputs of the present chain; of one at random where they move together."""
        chain = posterior.present_part
        if chain is None:
            chain = int(torch.randint(self.chains, ())) if self.together else 0
        return cast(Chains, self.learning(posterior)).outputs(posterior, inputs, chain, ood_rows=ood_rows)

    def finite(self, posterior: Posterior, inputs: Any) -> bool:
        """Return whether the outputs of all chains are."""
        return bool(self.learning(posterior).all_outputs(posterior, inputs).isfinite().all())

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage for each chain, or one for all, which also trains the likelihood's own parameters."""
        chains, num_data = self.learning(posterior).chains, self.data_count(posterior)
        if self.together:
            group = {"params": list(chains.parameters()), "num_data": num_data, "chains": self.chains}
            return [Stage(f"{self.chains} chains", [group, *_learned(posterior)])]
        return [
            Stage(
                f"chain {index + 1}/{self.chains}" if self.chains > 1 else self.name,
                [{"params": list(chain.parameters()), "num_data": num_data}, *_learned(posterior)],
                partial(posterior.member, index),
            )
            for index, chain in enumerate(chains)
        ]

    def data_count(self, posterior: Posterior) -> Tensor:
        """Return where the number of data is kept, which the sampler reads."""
        return cast(BankLaw, posterior.law).num_data

    def noise_shares(self, posterior: Posterior, chain: int | None = None) -> Tensor:
        """Return where the share of gradient noise of each chain is kept, or of one."""
        return cast(BankLaw, posterior.law).noise_shares(chain)

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the sampler of a chain; its seed comes from torch's global generator."""
        return Langevin(
            [{key: value for key, value in group.items() if key != "num_data"} for group in groups],
            groups[0]["num_data"],
            kind=self.kind,
            lr=self.lr,
            weight_decay=self.weight_decay,
            prior_std=self.prior_std,
            temperature=self.temperature,
            friction=self.friction,
            seed=int(torch.randint(2**62, ())),
            correction=self.correction,
        )

    def prepare_optimizer(self, posterior: Posterior, optimizer: Optimizer, num_data: int) -> None:
        """Let the sampler measure the noise of the minibatches' gradients.

        In a loop of your own `Learner.optimizer` calls it.
        """
        del num_data
        learning: Chains = self.learning(posterior)
        learning.meter = None
        if not isinstance(optimizer, Langevin):
            return
        processes = torch.distributed.get_world_size() if _distributed() else 1
        if processes > 1 and self.correction is not None:
            raise ValueError(
                f"correction={self.correction!r} needs the gradients of a whole minibatch, and each of {processes} "
                "processes has a part of it. Leave the correction out, or let every process run a chain of its own."
            )
        shares = self.noise_shares(posterior, None if self.together else posterior.present_part or 0)
        if processes == 1:
            learning.meter = optimizer.meter = GradientNoise(shares)
            optimizer.plan_look()

    def make_schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Return the schedule of the step sizes."""
        for group in optimizer.param_groups:
            group["adapt_steps"] = int(self.burn_in * total_steps)
            # A trial of a few steps is nobody's posterior.
            group["measure_after"] = max(1, group["adapt_steps"] if total_steps >= TRIAL else total_steps)
        if isinstance(optimizer, Langevin):
            optimizer.plan_look()
        return LambdaLR(optimizer, lambda step: self.step_size(step, total_steps))

    def step_size(self, step: int, total_steps: int) -> float:
        """Return the step size after so many steps, as a multiple of lr."""
        if self.schedule == "polynomial":
            return float((1 + step / self.decay_steps) ** -self.decay)
        if self.schedule == "cyclical":
            length = max(1, math.ceil(total_steps / self.cycles))
            return 0.5 * (1 + math.cos(math.pi * (step % length) / length))
        return 1.0

    def after_step(self, posterior: Posterior, step: int, total_steps: int, steps_per_epoch: int) -> None:
        """Keep a sample where one is due."""
        del steps_per_epoch
        law = cast(BankLaw, posterior.law)
        chains = list(range(self.chains)) if self.together else [posterior.present_part or 0]
        if step == 1:
            if 0 in chains:
                self.check_steps(int(law.num_data), total_steps)
            law.counts[chains] = 0  # a second fit replaces the samples of the first
            law.noise_shares()[chains] = -1
        if step in sample_steps(self, total_steps):
            self.collect(posterior, chains)

    def collect(self, posterior: Posterior, chains: Iterable[int] | None = None) -> None:
        """Keep the present state of every chain as a sample: what a loop of one's own calls after the burn-in."""
        law, learning = cast(BankLaw, posterior.law), self.learning(posterior)
        for chain in range(self.chains) if chains is None else chains:
            law.append(law.codec.join(learning.tensors(chain)), chain=chain)

    def finish(self, posterior: Posterior, loader: Iterable[Any], progress: Callable[..., Any]) -> None:
        """Re-estimate batch-normalisation statistics; a chain that ended before its first sample gives its end."""
        law = cast(BankLaw, posterior.law)
        self.collect(posterior, [index for index, count in enumerate(law.counts.tolist()) if count == 0])
        self.check_noise(law.noise_shares())
        self.learning(posterior).meter = None
        posterior.refresh_statistics(loader, max_batches=self.statistics_batches, progress=progress)

    def check_noise(self, shares: Tensor) -> None:
        """Warn where the noise of the minibatches' gradients is not small beside the injected one."""
        share = shares[shares >= 0].mean().item() if bool((shares >= 0).any()) else 0.0
        if share <= (TOLERATED if self.correction is None else 1.0):
            return
        less = f"With lr={_rounded_down(self.lr * TOLERATED / share):g} it is a tenth; larger batches have less too"
        if self.correction is not None:
            less = f"More than all of the injected noise cannot be taken off it. {less}"
        elif self.kind != "sghmc":
            less += ", and correction='shuffled' takes it off the injected noise"
        warnings.warn(
            f"The noise of the minibatches' gradients has {share:.2g} times the variance of the injected noise, so "
            f"that standard deviations can be {math.sqrt(1 + share):.2g} times those of the posterior. {less}.",
            stacklevel=2,
        )

    def check_steps(self, num_data: int, total_steps: int) -> None:
        """Refuse steps that overshoot under the prior alone; warn of a burn-in shorter than its relaxation time."""
        decay = self.weight_decay if self.prior_std is None else 1 / (num_data * self.prior_std**2)
        if self.kind == "sgld" and self.lr * decay >= 4:
            raise ValueError(
                f"The prior alone multiplies weights by 1 - lr weight_decay / 2 = {1 - self.lr * decay / 2:.3g} in "
                f"each step, so that chains diverge. Choose an lr well below 4 / weight_decay = {4 / decay:.2g}"
                + (f"; weight_decay is 1 / (n prior_std^2), with n = {num_data:,}." if self.prior_std else ".")
            )
        before = [self.lr * self.step_size(step, total_steps) for step in range(int(self.burn_in * total_steps))]
        speed = 1 / self.friction if self.kind == "sghmc" else 1.0
        # Preconditioned, the time is not known beforehand; a trial of a few steps is nobody's posterior.
        if self.kind == "psgld" or not decay or total_steps < TRIAL:
            return
        if (relaxed := speed * math.fsum(before) * decay / 2) < 1:
            warnings.warn(
                f"The burn-in of {len(before):,} steps is {relaxed:.2g} of the prior's relaxation time, 2/(lr "
                f"weight_decay) = {2 / (speed * self.lr * decay):,.0f} steps at the first step size: weights that the "
                "data leave open still drift while samples are taken. Raise epochs, lr or weight_decay (lower "
                "prior_std), or look at bayesify.diagnose.",
                stacklevel=2,
            )


def _learned(posterior: Posterior) -> list[dict[str, Any]]:
    """Return the group of the likelihood's own parameters, which are trained without noise."""
    own = [p for p in posterior.likelihood.parameters() if p.requires_grad]
    return [{"params": own, "sampled": False}] if own else []


def _rounded_down(value: float) -> float:
    """Return two digits.

    >>> _rounded_down(0.01499), _rounded_down(3.29)
    (0.014, 3.2)
    """
    unit = 10.0 ** (1 - math.floor(math.log10(value)))
    return math.floor(value * unit) / unit


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rows_match(outputs: Tensor, targets: Any) -> bool:
    """Return whether rows of a minibatch's outputs and targets can be taken."""
    return isinstance(targets, Tensor) and outputs.ndim > 0 and targets.shape[:1] == outputs.shape[:1]


@functools.lru_cache(maxsize=8)
def sample_steps(method: SGLD, total_steps: int) -> frozenset[int]:
    """Return the steps, from 1, after which a sample is kept.

    >>> sorted(sample_steps(SGLD(samples_per_chain=4), 16))
    [10, 12, 14, 16]
    >>> sorted(sample_steps(SGLD(samples_per_chain=3, thin=2, burn_in=0.0), 16))
    [12, 14, 16]
    """
    first = int(method.burn_in * total_steps)
    if method.thin is not None:
        return frozenset(list(range(total_steps, first, -method.thin))[: method.samples_per_chain])
    steps = range(first + 1, total_steps + 1)
    if method.schedule == "cyclical":
        length = max(1, math.ceil(total_steps / method.cycles))
        late = [step for step in steps if (step - 1) % length >= method.exploration * length]
        sizes = torch.ones(len(late), dtype=torch.float64)
    else:
        late = list(steps)
        sizes = torch.tensor([method.step_size(step - 1, total_steps) for step in late], dtype=torch.float64)
    if not late:
        return frozenset()
    time = sizes.cumsum(0)
    wanted = time[-1] * torch.arange(1, method.samples_per_chain + 1, dtype=torch.float64) / method.samples_per_chain
    found = torch.searchsorted(time, wanted * (1 - 1e-12)).clamp(max=len(late) - 1)
    return frozenset(late[index] for index in found.tolist())
