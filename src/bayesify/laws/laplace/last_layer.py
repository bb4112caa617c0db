"""Laplace's approximation of the last linear layer, with its full covariance and a prediction in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify._core.random import Key, keyed_numbers
from bayesify._core.trees import batch_rows
from bayesify.laws.components import Component, Dense
from bayesify.laws.laplace.evidence import Spectrum
from bayesify.laws.laplace.laplace import LaplaceLaw
from bayesify.laws.passes import Pass, Patch
from bayesify.laws.tensors import TensorTree, tensor_of
from bayesify.laws.trace import Trace
from bayesify.layers import layer_type
from bayesify.likelihoods.categorical import independent_variances

if TYPE_CHECKING:
    from bayesify.laws.posterior import Posterior

__all__ = ["LastLayerLaw", "last_features", "last_linear"]

LARGEST = 10_000  # parameters: their covariance then has 10^8 numbers
AT_ONCE = 2**23  # numbers


class LastLayerLaw(LaplaceLaw):
    """N(w, (H / noise variance + delta I)^-1) of one linear layer y = W phi + b, whose output is the network's.

    With phi extended by a one for the bias, H = sum_n Lambda_n (x) phi_n phi_n', Lambda_n the curvature in the outputs
    of example n. Outputs are linear in these weights, so that they are Gaussian, and the prediction of a regression is
    exact: mean f(x), covariance of outputs c and d phi' Sigma_cd phi. For classes softmax is integrated over the
    Gaussian logits, see `Likelihood.from_gaussian`.

    `matrix` holds the sum H while the data are seen, and afterwards its eigenvectors; `values` the eigenvalues.

    Args:
        network: The network.
        layer: The linear layer's name.
        names: Its random parameters: the weight, and perhaps the bias.
        precision: The prior precision at the start.
        power: See `Residuals`.
    """

    def __init__(self, network: nn.Module, *, layer: str, names: list[str], precision: float, power: int) -> None:
        super().__init__(network)
        self.layer: str = layer
        self._names = names
        module = network.get_submodule(layer)
        assert isinstance(module, nn.Linear)
        self.outputs_count, self.inputs_count = module.weight.shape
        self.with_bias = len(names) == 2
        self.width = self.inputs_count + self.with_bias
        size = self.outputs_count * self.width
        if size > LARGEST:
            raise ValueError(
                f"The last layer {layer!r} has {size:,} parameters, and their covariance would have {size**2:,} "
                f"numbers; {LARGEST:,} parameters are the most. Take Kronecker factors of that layer instead: "
                f"convert(network, Laplace(structure='kronecker'), include={layer!r})."
            )
        weight = module.weight.detach()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.matrix = TensorTree({names[0]: weight.new_zeros(size, size, dtype=dtype)})
        self.values = TensorTree({names[0]: weight.new_zeros(size, dtype=dtype)})
        self._cache: tuple[Any, Tensor] | None = None
        self._start({layer: names}, precision=precision, power=power)

    # -- the curvature ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the layer's random parameters."""
        return self._names

    @property
    def _matrix(self) -> Tensor:
        return tensor_of(self.matrix, self._names[0])

    @property
    def _values(self) -> Tensor:
        return tensor_of(self.values, self._names[0])

    def curvature_tensors(self) -> list[Tensor]:
        """Return the sum, and the eigenvalues."""
        return [self._matrix, self._values]

    def extended(self, features: Tensor) -> Tensor:
        """Append a one for the bias."""
        if not self.with_bias:
            return features
        return torch.cat([features, torch.ones_like(features[..., :1])], -1)

    @torch.no_grad()
    def add_hessians(self, features: Tensor, hessians: Tensor) -> None:
        """Add sum Lambda (x) phi phi' of features (N, D) and curvatures in the outputs (N, C, C)."""
        phi, count, width = self.extended(features), self.outputs_count, self.width
        blocks = self._matrix.view(count, width, count, width)
        for row in range(count):
            for column in range(row + 1):
                block = (phi * hessians[:, row, column, None]).T @ phi
                blocks[row, :, column] += block
                if column < row:
                    blocks[column, :, row] += block.T

    @torch.no_grad()
    def add_gradients(self, features: Tensor, scores: Tensor) -> None:
        """Add the outer product of each example's gradient, sum over positions of s phi', (B, T, D) and (B, T, C)."""
        gradients = (scores.mT @ self.extended(features)).flatten(1)
        self._matrix.addmm_(gradients.T, gradients)

    def complete_curvature(self, factor: float) -> None:
        """Replace the sum by its eigenvectors and eigenvalues."""
        values, vectors = torch.linalg.eigh(self._matrix.double() * factor)
        self._matrix.copy_(vectors)
        self._values.copy_(values.clamp_min_(0))

    def reopen_curvature(self) -> None:
        """Put the sum, Q diag(values) Q', in the place of its eigenvectors."""
        self._matrix.copy_((self._matrix.double() * self._values.double()) @ self._matrix.double().T)
        self._values.zero_()

    def times_precision(self, tensors: Mapping[str, Tensor], power: float = 1.0) -> dict[str, Tensor]:
        """Multiply by Q diag(values / noise variance + delta)^power Q'."""
        parts = [tensors[self._names[0]], *(tensors[name][:, None] for name in self._names[1:])]
        vector = torch.cat(parts, 1).flatten().to(self._matrix.dtype)
        precision = self._values * self.scale + self.prior_precision
        found = (self._matrix @ (precision**power * (self._matrix.T @ vector))).view(self.outputs_count, self.width)
        return dict(zip(self._names, (found[:, : self.inputs_count], found[:, -1]), strict=False))

    def spectra(self) -> list[Spectrum]:
        """Return the eigenvalues."""
        return [Spectrum(self._values.double(), self._square_norm(self.names))]

    def covariance(self) -> Tensor:
        """Return the covariance of (W, b), (C D', C D'), with D' = D + 1 and a row of (W, b) after the other."""
        self.require_complete()
        return (self._matrix / (self._values * self.scale + self.prior_precision)) @ self._matrix.T

    # -- draws ------------------------------------------------------------------------------------------------------

    def drawn(self, key: Key | None) -> dict[str, Tensor]:
        """Return the weights of a draw by name: w + Q (lambda + delta)^(-1/2) z."""
        means = [self.tensor(name) for name in self.names]
        if not bool(self.complete):
            return dict(zip(self.names, means, strict=True))
        values = self._values
        noise = torch.randn_like(values) if key is None else keyed_numbers(key, self._names[0], values.shape, values)
        change = self._matrix @ (noise * (self._values * self.scale + self.prior_precision).rsqrt())
        change = change.view(self.outputs_count, self.width).to(means[0].dtype)
        found = {self._names[0]: means[0] + change[:, : self.inputs_count]}
        if self.with_bias:
            found[self._names[1]] = means[1] + change[:, -1]
        return found

    # -- the prediction in closed form ------------------------------------------------------------------------------

    def components(self, trace: Trace | None = None) -> list[Component]:
        """Return one component, with the whole covariance of the layer."""
        del trace
        means = {name: self.tensor(name).detach() for name in self.names}
        fixed = {name: tensor for name, tensor in self.own.as_dict().items() if name not in means}
        if not bool(self.complete):
            variances = {name: torch.zeros_like(mean) for name, mean in means.items()}
        else:
            squares = self._matrix.square() @ (1 / (self._values * self.scale + self.prior_precision))
            each = squares.view(self.outputs_count, self.width).to(means[self._names[0]].dtype)
            variances = {self._names[0]: each[:, : self.inputs_count]}
            if self.with_bias:
                variances[self._names[1]] = each[:, -1]
        return [Component(means, variances, fixed, dense=Dense(self.layer, self.output_gaussian))]

    @torch.no_grad()
    def output_variance(self, features: Tensor, *, centred: bool) -> Tensor:
        """Return the variances of the outputs, or of the outputs minus their mean, (..., C)."""
        phi, forms = self.extended(features), self._forms(centred)
        products = phi @ forms.permute(1, 0, 2).reshape(self.width, -1)
        return (products.view(*phi.shape[:-1], self.outputs_count, self.width) * phi[..., None, :]).sum(-1)

    @torch.no_grad()
    def output_covariance(self, features: Tensor) -> Tensor:
        """Return the covariance of the outputs, phi' Sigma_cd phi, (..., C, C).

        With the eigenvectors' rows A = phi' Q_c it is A (lambda + delta)^-1 A', without the covariance of the weights.
        """
        self._require_seen()
        phi, count = self.extended(features).flatten(0, -2), self.outputs_count
        vectors = self._matrix.view(count, self.width, -1)
        variances = 1 / (self._values * self.scale + self.prior_precision)

        def of(some: Tensor) -> Tensor:
            met = torch.stack([some @ vectors[index] for index in range(count)], 1)
            return (met * variances) @ met.mT

        rows = max(1, AT_ONCE // (count * self.width * count))
        # The number of rows is a symbol while a program is traced, and all rows go together.
        whole = not isinstance(phi.shape[0], int) or phi.shape[0] <= rows
        found = of(phi) if whole else torch.cat([of(some) for some in torch.split(phi, rows)])
        return found.view(*features.shape[:-1], count, count)

    def _forms(self, centred: bool) -> Tensor:
        """Return the quadratic forms in phi that give the variances, (C, D', D'); kept until the posterior changes.

        With rows Q_c of the eigenvectors they are Q_c (lambda + delta)^-1 Q_c', a C-th of the whole covariance's work.
        """
        if _traced() and self._cache is not None and self._cache[0][0] == centred:
            return self._cache[1]
        state = [(t.data_ptr(), t._version) for t in (self._matrix, self._values, self.prior_precision)]
        wanted = (centred, self.scale, state)
        if self._cache is None or self._cache[0] != wanted:
            self.require_complete()
            vectors = self._matrix.view(self.outputs_count, self.width, -1)
            if centred:  # l_c - mean l is linear in w_c - mean w
                vectors = vectors - vectors.mean(0)
            forms = (vectors / (self._values * self.scale + self.prior_precision)) @ vectors.mT
            self._cache = (wanted, forms)
        return self._cache[1]

    @torch.no_grad()
    def output_gaussian(self, output: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return mean, and variance or covariance, of the outputs; exact, since they are linear in what is random.

        Args:
            output: Of the mean network.
            features: The layer's inputs, (B, T, D).
        """
        self._require_seen()
        if self.likelihood.softmax_dim(output.ndim) is not None and self.outputs_count > 2:
            return output, None, self.output_covariance(features).reshape(*output.shape, self.outputs_count)
        return output, self.output_variances(output, features), None

    def _require_seen(self) -> None:
        if not _traced():
            self.require_complete()

    def output_variances(self, output: Tensor, features: Tensor) -> Tensor:
        """Return variances of the outputs: of logits, those of independent ones with the same after centring."""
        classes = self.likelihood.softmax_dim(output.ndim) is not None
        variance = self.output_variance(features, centred=classes).reshape(output.shape)
        return independent_variances(variance) if classes else variance


def last_features(posterior: Posterior, layer: str, inputs: Any, patch: Patch | None = None) -> tuple[Tensor, Tensor]:
    """Run the mean network once; return its outputs and the inputs of its last layer as (B, T, D).

    Args:
        posterior: The posterior.
        layer: The last linear layer's name.
        inputs: B examples.
        patch: What stands in the network's place: the mean of one part of a mixture, say; None takes the law's mean.

    Raises:
        ValueError: The layer's output is not the network's.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        seen.append((args[0] if args else kwargs["input"], output))

    handle = posterior.network.get_submodule(layer).register_forward_hook(keep, with_kwargs=True)
    try:
        output = posterior.outputs(inputs, Pass("mean"), patch=patch)
    finally:
        handle.remove()
    if len(seen) != 1 or not (_traced() or _same_numbers(seen[0][1], output)):
        raise ValueError(
            f"The output of the last linear layer {layer!r} is not the network's: it is changed afterwards, "
            "or another layer comes last. Name the layer, convert(..., include='its name'), or take "
            "Laplace(structure='diagonal'), which needs no last layer."
        )
    features = seen[0][0].detach()
    return output, features.reshape(batch_rows(inputs), -1, features.shape[-1])


def _traced() -> bool:
    """Return whether a program is being traced, which has no numbers to look at; they were looked at before."""
    return torch.compiler.is_compiling()


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.reshape(-1), other.reshape(-1))


def last_linear(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Return the name of the last linear layer, in the order in which a network holds its modules."""
    names = [name for name, module in modules if layer_type(module).family == "linear"]
    return names[-1] if names else None
