"""What the laws of Laplace's approximation share: a prior, what was seen of the data, and the evidence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify._core.random import Key
from bayesify.laws.laplace.evidence import Residuals, Spectrum, choose, log_evidence
from bayesify.laws.law import Law, Rescaling
from bayesify.laws.passes import Pass, Patch, Refusal
from bayesify.likelihoods import Gaussian, Likelihood

if TYPE_CHECKING:
    from bayesify.laws.posterior import Posterior

__all__ = ["LaplaceLaw", "as_groups"]


def as_groups(names: Iterable[str], *, each_layer: bool) -> dict[str, list[str]]:
    """Return which parameters share a prior precision: those of a layer, or all.

    >>> as_groups(["a.weight", "a.bias", "b.weight"], each_layer=True)
    {'a': ['a.weight', 'a.bias'], 'b': ['b.weight']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] if each_layer else "", []).append(name)
    return found


class LaplaceLaw(Law):
    """N(w, (H / noise variance + delta I)^-1): w the trained weights, H the curvature, delta the prior precision.

    The curvature is a buffer, and the prior can be changed after the data have been seen. Before that nothing is
    random.

    Attributes:
        layer: The only random layer, where outputs are linear in it, so that they are Gaussian themselves; else None.
        groups: Names of the parameters that share a prior precision, by the name of the group.
        prior_precision: One for each group.
        seen: How many examples the curvature is the sum of.
        log_likelihood: Sum of ln p(y | f(x)) at the mode.
        square_sum, targets: Sum of squared residuals and number of targets, for regression.
        complete: Whether the pass over the data was finished.
    """

    first_order = True
    stacks = True
    likelihood: Likelihood
    layer: str | None = None
    groups: dict[str, list[str]]
    prior_precision: Tensor
    seen: Tensor
    log_likelihood: Tensor
    square_sum: Tensor
    targets: Tensor
    complete: Tensor

    def _start(self, groups: dict[str, list[str]], *, precision: float, power: int) -> None:
        self.groups = groups
        self.power = power
        self._index = {name: index for index, names in enumerate(groups.values()) for name in names}
        like = next(iter(self.network.parameters()))
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("prior_precision", torch.full((len(groups),), precision, dtype=dtype, device=like.device))
        for name in ("seen", "log_likelihood", "square_sum", "targets"):
            self.register_buffer(name, torch.zeros((), dtype=dtype, device=like.device))
        self.register_buffer("complete", torch.zeros((), dtype=torch.bool, device=like.device))

    # -- the curvature, as it is collected ------------------------------------------------------------------------

    @abstractmethod
    def curvature_tensors(self) -> list[Tensor]:
        """Return the tensors that hold sums over examples."""

    @abstractmethod
    def complete_curvature(self, factor: float) -> None:
        """Multiply the sums so that they stand for all data, and turn them into what draws are made from."""

    @abstractmethod
    def reopen_curvature(self) -> None:
        """Turn what draws are made from into sums over examples again, to which more can be added."""

    @abstractmethod
    def times_precision(self, tensors: Mapping[str, Tensor], power: float = 1.0) -> dict[str, Tensor]:
        """Multiply weights, or gradients, by a power of the precision H / noise variance + delta I."""

    @torch.no_grad()
    def reset_curvature(self) -> None:
        """Forget the data."""
        for tensor in self.curvature_tensors():
            tensor.zero_()
        for tensor in (self.seen, self.log_likelihood, self.square_sum, self.targets):
            tensor.zero_()
        self.complete.fill_(False)
        self.refresh()

    @torch.no_grad()
    def finish_curvature(self, num_data: int) -> None:
        """End the pass: what was seen stands for `num_data` examples."""
        if not self.seen.item():
            raise ValueError("No example was seen, so there is no curvature. Check the loader.")
        factor = num_data / self.seen.item()
        for tensor in (self.log_likelihood, self.square_sum, self.targets):
            tensor.mul_(factor)
        self.complete_curvature(factor)
        self.seen.fill_(num_data)
        self.complete.fill_(True)
        self.refresh()

    def refresh(self) -> None:
        """Recompute what depends on the prior and the noise."""

    # -- the prior --------------------------------------------------------------------------------------------------

    @abstractmethod
    def spectra(self) -> list[Spectrum]:
        """Return the curvature's eigenvalues and the weights' norm for each group."""

    @property
    def scale(self) -> float:
        """Return what the curvature is multiplied by: 1 / noise variance if that is one number, else 1."""
        variance = self._noise_variance()
        return 1.0 if variance is None else variance**-self.power

    def _noise_variance(self) -> float | None:
        return self.likelihood.single_variance()

    def determined_parameters(self) -> float:
        """Return gamma = sum_i l_i / (l_i + delta), l the curvature's eigenvalues (MacKay 1992).

        How many parameters the data determine rather than the prior.
        """
        self.require_complete()
        pairs = zip(self.spectra(), self.prior_precision.tolist(), strict=True)
        return sum(float((s.values * self.scale / (s.values * self.scale + p)).sum()) for s, p in pairs)

    @torch.no_grad()
    def set_prior_precision(self, precision: float | Sequence[float] | Tensor) -> None:
        """Set the prior precision: one number, or one for each of `groups`."""
        values = torch.as_tensor(precision, dtype=self.prior_precision.dtype).to(self.prior_precision.device)
        if values.ndim > 1 or (values.ndim == 1 and len(values) != len(self.groups)):
            raise ValueError(
                f"The prior precision is one number, or {len(self.groups)}, one for each of {list(self.groups)[:5]}, "
                f"but it has the shape {tuple(values.shape)}."
            )
        if not bool((values > 0).all()):
            raise ValueError(f"A prior precision must be positive, but the least is {values.min().item()}.")
        self.prior_precision.copy_(values)
        self.refresh()

    def rescaling(self) -> Rescaling | Refusal:
        """Return what multiplies the prior's standard deviation: its precision is divided by the factor's square."""
        if (reason := self.learned) is not True:
            return Refusal(reason)
        before = self.prior_precision.clone()
        return lambda factor: self.set_prior_precision(before / factor**2)

    def log_marginal_likelihood(self) -> float:
        """Return ln p(D) of Laplace's approximation with the present prior and noise, in nats; see `log_evidence`."""
        self.require_complete()
        variance = self._noise_variance()
        likelihood = self.log_likelihood.item() if variance is None else self._residuals().log_likelihood(variance)
        return log_evidence(likelihood, self.spectra(), self.prior_precision.tolist(), self.scale)

    @torch.no_grad()
    def maximise_evidence(self, *, fixed_precision: bool = False) -> None:
        """Set prior precision and, where it is one learned number, noise to those of most evidence."""
        self.require_complete()
        variance = self._noise_variance()
        likelihood = self.likelihood
        learned = variance is not None and isinstance(likelihood, Gaussian) and likelihood.noise_std is None
        if fixed_precision and not learned:
            return
        if variance is not None and not learned:  # the curvature's scale is known
            spectra = [Spectrum(s.values * self.scale, s.square_norm) for s in self.spectra()]
            chosen, _ = choose(spectra, self.prior_precision.tolist())
        else:
            chosen, found = choose(
                self.spectra(),
                self.prior_precision.tolist(),
                residuals=self._residuals() if learned else None,
                variance=variance or 1.0,
                fixed_precision=fixed_precision,
            )
            if learned:
                assert isinstance(likelihood, Gaussian)
                likelihood.log_noise.fill_(0.5 * torch.tensor(found, dtype=torch.float64).log().item())
        self.set_prior_precision(chosen)

    def choose_prior(
        self, posterior: Posterior, val_loader: Iterable[Any], *, num_draws: int | None = None, seed: int = 0
    ) -> None:
        """Set the prior precision to that of least validation NLL, without another pass over the training data.

        Args:
            posterior: The posterior of this law.
            val_loader: Batches of (inputs, targets) that were not trained on.
            num_draws: How many draws, where there is no closed form; None takes the posterior's own number.
            seed: Of the draws.
        """
        from bayesify.laws.laplace.validation import choose_on_validation

        choose_on_validation(posterior, val_loader, num_draws=num_draws, seed=seed)

    def _residuals(self) -> Residuals:
        return Residuals(self.square_sum.item(), self.targets.item(), self.power)

    # -- draws --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def drawn(self, key: Key | None) -> dict[str, Tensor]:
        """Return the weights of a draw by name; of a new one where there is no key."""

    def patch(self, p: Pass) -> Patch:
        """Return the drawn weights; a fresh pass has one draw for all examples."""
        if p.kind == "mean":
            return Patch(self.own.as_dict())
        return Patch({**self.own.as_dict(), **self.drawn(p.keys[0] if p.keys else None)})

    @property
    def learned(self) -> Any:
        """True once the data were seen; before, what to call."""
        if bool(self.complete):
            return True
        return Refusal("There is no curvature yet: bayesify.fit(posterior, loader) makes a pass over the data.")

    def require_complete(self) -> None:
        """Raise, and say what to do, before the data were seen."""
        if (reason := self.learned) is not True:
            raise ValueError(reason)

    def _square_norm(self, names: Iterable[str]) -> float:
        return sum(self.tensor(name).detach().double().square().sum().item() for name in names)

    def _precision_of(self, name: str) -> Tensor:
        """Return the prior precision of a parameter."""
        return self.prior_precision[self._index[name]]
