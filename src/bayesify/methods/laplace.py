"""Laplace: a Gaussian around the trained weights, from the curvature of the loss."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from bayesify.curvature import Curvature, has_factors
from bayesify.laws import DiagonalLaw, KroneckerLaw, LaplaceLaw, LastLayerLaw, Pass, Posterior
from bayesify.laws.laplace import Block, as_groups, last_linear
from bayesify.methods.laplace_survey import LaplaceSurvey
from bayesify.methods.method import Method, Survey, register
from bayesify.selection import Conversion, ConversionRow, Selection, require_something, select_parameters

__all__ = ["Laplace"]

START = 1.0  # the prior precision from which the search for a better one starts


@register
@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """A Gaussian around the trained weights, as wide as the loss is flat (MacKay 1992; Daxberger et al. 2021).

    q(w) = N(w*, (H + delta I)^-1), with w* the trained weights, H = sum_n J_n' Lambda_n J_n the generalised
    Gauss-Newton (GGN) curvature of the training examples, J the derivative of the outputs in the weights and Lambda the
    curvature of -ln p in the outputs, and delta the precision of the prior N(0, 1/delta). `fit` makes one pass over
    the data, and trains first, without noise, if it is given epochs. Nothing is random before.

    Attributes:
        structure: "last-layer", the full covariance of the last linear layer, whose prediction `how="streamlined"`
            costs one pass; "diagonal", independent weights of every layer, a `GaussianLaw`; "kronecker", a
            Kronecker product for each linear layer and convolution, and a diagonal for other parameters.
        curvature: "ggn", or "fisher", the empirical Fisher: squared gradients of ln p of the true labels.
        mc_labels: Labels drawn from the prediction for each example, which estimate the GGN in so many backward passes;
            None is exact and takes as many as an example has outputs (C - 1 for C classes).
        prior_precision: delta; or how it is chosen: "auto", on the validation data given to `fit` if there are any and
            by the marginal likelihood otherwise; "marginal-likelihood"; or "validation", the NLL of these data. On a
            network that fits its training data to the last one the marginal likelihood knows too little of them, and
            can be far too wide: give `fit` validation data.
        prior_per: Whether the "network" has one prior precision, or each "layer" its own.
        seed: Of the drawn labels, and of the draws on validation data.
    """

    name = "laplace"
    renamed: ClassVar[dict[str, str]] = {**Method.renamed, "samples": "mc_labels"}
    trains_draws = False
    if_worse = (
        "The posterior is too wide: choose its prior on validation data (prior_precision='auto' or 'validation', and "
        "fit(..., val_loader=loader)), or set a larger precision, posterior.law.set_prior_precision(...)."
    )

    structure: Literal["last-layer", "diagonal", "kronecker"] = "last-layer"
    curvature: Curvature = "ggn"
    mc_labels: int | None = None
    prior_precision: float | Literal["auto", "marginal-likelihood", "validation"] = "auto"
    prior_per: Literal["network", "layer"] = "network"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        for key, choices in (
            ("structure", ("last-layer", "diagonal", "kronecker")),
            ("curvature", ("ggn", "fisher")),
            ("prior_per", ("network", "layer")),
        ):
            if getattr(self, key) not in choices:
                raise ValueError(f"{key} must be one of {list(choices)}, but it is {getattr(self, key)!r}.")
        precision = self.prior_precision
        if isinstance(precision, str):
            if precision not in ("auto", "marginal-likelihood", "validation"):
                raise ValueError(
                    "prior_precision must be a positive number, 'auto', 'marginal-likelihood' or 'validation', but it "
                    f"is {precision!r}."
                )
        elif not 0 < precision < math.inf:
            raise ValueError(f"prior_precision must be positive and finite, but it is {precision}.")
        if self.mc_labels is not None:
            if self.mc_labels < 1:
                raise ValueError(f"mc_labels must be at least 1, or None for the exact GGN, not {self.mc_labels}.")
            if self.curvature == "fisher":
                raise ValueError("mc_labels draws labels for the GGN; the empirical Fisher takes the true ones.")
            if self.structure == "last-layer":
                raise ValueError("The exact GGN of the last layer needs no backward pass: leave mc_labels=None.")

    # -- building -------------------------------------------------------------------------------------------------

    @property
    def beside_adapters(self) -> bool:
        """Whether the layer is a head, which is trained beside an adapter."""
        return self.structure == "last-layer"

    def build(self, network: nn.Module, selection: Selection) -> tuple[LaplaceLaw, Conversion]:
        """Take the weights as means; nothing is random until the data have been seen."""
        names, table = select_parameters(network, selection, how=f"Gaussian, {self.structure}")
        require_something(table, network, "Laplace", "parameters that are not frozen")
        start = START if isinstance(self.prior_precision, str) else float(self.prior_precision)
        settings: dict[str, Any] = {"precision": start, "power": 2 if self.curvature == "fisher" else 1}
        if self.structure == "last-layer":
            layer, table = _last_layer(network, table)
            own = [name for name in names if name.rpartition(".")[0] == layer]
            return LastLayerLaw(network, layer=layer, names=own, **settings), table
        settings["groups"] = as_groups(names, each_layer=self.prior_per == "layer")
        if self.structure == "diagonal":
            return DiagonalLaw(network, names=names, **settings), table
        blocks = _blocks(network, names)
        covered = {name for block in blocks for name in (block.weight, block.bias)}
        others = [name for name in names if name not in covered]
        return KroneckerLaw(network, blocks=blocks, others=others, **settings), table

    # -- learning -------------------------------------------------------------------------------------------------

    def outputs(self, posterior: Posterior, inputs: Any, *, ood_rows: int = 0) -> Tensor:
        """Return the outputs of the mean network, which is what epochs train."""
        return posterior.outputs(inputs, Pass("mean", ood_rows=ood_rows))

    def survey(self, posterior: Posterior, num_data: int) -> Survey:
        """Return what collects the curvature in a pass over the data, and chooses the prior."""
        return LaplaceSurvey(
            posterior,
            num_data,
            curvature=self.curvature,
            samples=self.mc_labels,
            prior=self.prior_precision if isinstance(self.prior_precision, str) else None,
            seed=self.seed,
        )


def _last_layer(network: nn.Module, table: Conversion) -> tuple[str, Conversion]:
    """Choose the last linear layer among those that are wanted, and say of the others that they are not it."""
    layer = last_linear(
        (name, module)
        for name, module in ((name, network.get_submodule(name)) for name in table.converted)
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    )
    if layer is None:
        raise ValueError(
            "Laplace(structure='last-layer') needs a linear layer (torch.nn.Linear) that is not frozen, and none was "
            f"selected. Laplace(structure='diagonal') takes layers of any type.\n{table}"
        )
    module = network.get_submodule(layer)
    if sum(p is module.weight for m in network.modules() for p in m._parameters.values()) > 1:
        raise ValueError(
            f"The weight of the last linear layer {layer!r} is tied to another module's, so that outputs are not "
            "linear in it. Use Laplace(structure='diagonal')."
        )
    rows = [
        row
        if not row.converted or row.name == layer
        else ConversionRow(row.name, row.type, row.parameters, False, "not the last linear layer")
        for row in table.rows
    ]
    return layer, Conversion(tuple(rows))


def _blocks(network: nn.Module, names: list[str]) -> list[Block]:
    """Return the layers that have Kronecker factors: linear ones and convolutions, without tied weights."""
    holders = Counter(id(p) for module in network.modules() for p in module._parameters.values() if p is not None)
    wanted, found = set(names), []
    for name in names:
        layer, _, last = name.rpartition(".")
        module = network.get_submodule(layer)
        tied = any(holders[id(p)] > 1 for p in module.parameters(recurse=False))
        if last == "weight" and has_factors(module) and not tied:
            bias = f"{layer}.bias" if layer else "bias"
            found.append(Block.of(network, layer, name, bias if bias in wanted else None))
    return found
