"""SWAG: a Gaussian around the path of SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from bayesify.laws import LowRankLaw, Pass, Patch, Posterior
from bayesify.methods.method import Method, Stage, register
from bayesify.selection import Conversion, Selection, require_something, select_parameters

__all__ = ["SWAG"]


@register
@dataclass(frozen=True, kw_only=True)
class SWAG(Method):
    """Stochastic weight averaging, Gaussian: diagonal plus low rank (Maddox et al. 2019).

    SGD goes on from the trained weights at a constant rate; snapshots of its path give the mean, the variances and
    the low-rank part of a Gaussian. Fitting costs the epochs of plain training, and `num_bn_draws + 1` passes over the
    data at the end for networks with batch normalisation; prediction a plain pass per draw.

    Attributes:
        rank: How many deviations the low-rank part keeps; 0 is SWAG-diagonal.
        scale: Multiplies the standard deviations; 1 is the paper's.
        snapshots_per_epoch: How often weights are collected.
        num_bn_draws: For networks with batch normalisation: how many draws get their own statistics.
        statistics_batches: How many batches re-estimate them; None takes the whole loader.
    """

    name = "swag"
    renamed: ClassVar[dict[str, str]] = {**Method.renamed, "num_draws": "num_bn_draws"}
    trains_draws = False

    rank: int = 20
    scale: float = 1.0
    snapshots_per_epoch: int = 1
    num_bn_draws: int = 20
    statistics_batches: int | None = None
    epochs: int = 20
    lr: float = 0.01
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.rank == 1:
            raise ValueError("rank=1 has no low-rank covariance (it divides by rank - 1); use 0, or 2 and more.")

    @classmethod
    def example(cls) -> SWAG:
        """Return a short run with several snapshots per epoch."""
        return cls(epochs=8, rank=10, snapshots_per_epoch=3)

    def build(self, network: nn.Module, selection: Selection) -> tuple[LowRankLaw, Conversion]:
        """Start from the given weights, with no spread."""
        names, table = select_parameters(network, selection, how="Gaussian around the path of SGD")
        require_something(table, network, "SWAG", "parameters that are not frozen")
        return LowRankLaw(network, names=names, rank=self.rank, scale=self.scale, num_bn_draws=self.num_bn_draws), table

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Train what is averaged, and nothing else: a snapshot of some layers means little if the others move on."""
        chosen = [posterior.network.get_parameter(name) for name in posterior.law.names]
        return [Stage(self.name, [{"params": [*chosen, *posterior.likelihood.parameters()]}])]

    def outputs(self, posterior: Posterior, inputs: Any, *, ood_rows: int = 0) -> Tensor:
        """Return the outputs of the SGD iterate, not of a draw: it is what is trained."""
        return posterior.outputs(inputs, Pass(ood_rows=ood_rows), patch=Patch())

    def after_step(self, posterior: Posterior, step: int, total_steps: int, steps_per_epoch: int) -> None:
        """Collect a snapshot at equal distances, the last one at the end."""
        del total_steps
        passed = step * self.snapshots_per_epoch // steps_per_epoch
        before = (step - 1) * self.snapshots_per_epoch // steps_per_epoch
        if passed > before:
            cast(LowRankLaw, posterior.law).collect()

    def finish(self, posterior: Posterior, loader: Iterable[Any], progress: Callable[..., Any]) -> None:
        """Re-estimate batch-normalisation statistics for the mean and the draws."""
        posterior.refresh_statistics(loader, max_batches=self.statistics_batches, progress=progress)
