"""A bank: weight samples, stored once as a matrix of only what is random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.trees import batch_rows, call
from bayesify.laws.mapped import mapped_tensor
from bayesify.laws.noise import Key, ShapeError
from bayesify.laws.posterior import Posterior
from bayesify.laws.statistics import estimate_statistics, statistics_rows, statistics_tree
from bayesify.laws.tensors import Codec, TensorTree, batch_norms, owners
from bayesify.laws.vectorised import chain_states, runs_batched, vectorised_outputs, vectorised_pass

if TYPE_CHECKING:
    from bayesify.methods import Method

__all__ = ["BankPosterior"]

MOST_SAMPLES = 100  # of a prediction, unless the caller says
# How many weights are put side by side in one vectorised pass, at most: beyond the cache it gains nothing.
TOGETHER = 2**22


class BankPosterior(Posterior):
    """The empirical distribution of weight samples, q = (1/M) sum_m delta(w - w_m).

    Samples are the rows of one matrix (M, D), in float32 or half precision; the rest of the network is there once.
    A prediction over T of them costs T plain passes, and far less for networks of linear layers at small batches, where
    they run as batched products. Draws are rows at equal distances, so fewer draws than rows are a thinned bank.
    Rows come in groups of equal size, one for each chain that made them. Batch-normalisation statistics are kept for
    each row and for the mean.

    Args:
        network: A copy of the user's network.
        method: How the samples are made.
        names: The random parameters, in the order of the columns.
        size: The number M of rows that there is room for.
        chains: For each chain, the parameters by name that it begins with and a sampler moves; empty for a bank that
            is complete.
        groups: How many groups the rows are in; None takes one for each chain.
        dtype: Of the matrix; None takes the parameters' own.
    """

    samples: Tensor
    counts: Tensor
    num_data: Tensor
    fresh_statistics: Tensor
    gradient_noise: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        *,
        names: list[str],
        size: int,
        chains: Sequence[Mapping[str, Tensor]] = (),
        groups: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(network, method)
        groups = groups or max(1, len(chains))
        if size < 1 or size % groups:
            raise ValueError(f"A bank of {size} rows cannot be shared by {groups} chains evenly.")
        self.codec = Codec(network, names)
        device = next(network.parameters()).device
        rows = torch.zeros(size, sum(self.codec.sizes), dtype=dtype or self.codec.dtype, device=device)
        self.register_buffer("samples", rows)
        self.register_buffer("counts", torch.zeros(groups, dtype=torch.long, device=device))
        self.register_buffer("num_data", torch.zeros((), dtype=torch.long, device=device))
        self.register_buffer("fresh_statistics", torch.ones(2, dtype=torch.bool, device=device))  # mean's, rows'
        # Of each chain, in variances of the injected noise; negative where it was not measured.
        dtype = torch.promote_types(self.codec.dtype, torch.float32)
        self.register_buffer("gradient_noise", torch.full((groups,), -1.0, dtype=dtype, device=device))
        self.meter: Any = None  # of a sampler's gradients, while it runs
        self.statistics = statistics_tree(network, size + 1)
        self.chains = chain_states(chains, names)
        self.default_samples = min(size, MOST_SAMPLES)
        self._average: tuple[Any, Tensor] | None = None

    # -- filling ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of samples that there are."""
        return int(self.counts.sum())

    @property
    def rows(self) -> list[int]:
        """The filled rows of the matrix."""
        return [row for rows in self.chain_rows() for row in rows]

    def chain_rows(self) -> list[list[int]]:
        """Return the filled rows of each chain."""
        each = len(self.samples) // len(self.counts)
        return [list(range(group * each, group * each + count)) for group, count in enumerate(self.counts.tolist())]

    def by_chain(self) -> Tensor:
        """Return the samples as (chains, draws, D), as many of each chain as all of them have."""
        draws = int(self.counts.min())
        return self.samples.view(len(self.counts), -1, self.samples.shape[1])[:, :draws]

    @torch.no_grad()
    def append(self, weights: Tensor, *, chain: int = 0) -> None:
        """Add a sample of a chain, (D,)."""
        each, count = len(self.samples) // len(self.counts), int(self.counts[chain])
        if count == each:
            raise ValueError(f"The bank is full: there is room for {each} samples of each chain.")
        row = self.samples[chain * each + count]
        row.copy_(weights)
        if self.samples.dtype == torch.float16 and not bool(row.isfinite().all()) and bool(weights.isfinite().all()):
            raise ValueError("A weight is beyond float16's range, 65504. Store the samples in bfloat16 or float32.")
        self.counts[chain] = count + 1
        if self.statistics.as_dict():
            self.fresh_statistics.fill_(False)

    @torch.no_grad()
    def collect_chains(self) -> None:
        """Keep the present state of every chain as a sample: what a loop of one's own calls after the burn-in."""
        for chain in range(len(self.chains)):
            self.append(self.codec.join(self.chain_tensors(chain)), chain=chain)

    @property
    def learned(self) -> Literal[True] | str:
        """True once there are samples; before, what to call."""
        if bool(self.counts.any()):
            return True
        return (
            "no sample has been kept. bayesify.fit(posterior, loader) runs the chains; in a loop of your own, with the "
            "sampler that posterior.method.make_optimiser makes, call posterior.collect_chains() after the burn-in."
        )

    @torch.no_grad()
    def map_samples(self, path: str | Path) -> None:
        """Move the samples to a new safetensors file, which then holds them in memory's place: for large banks.

        What is appended from now on is written there, and memory has only what is in use. Copies, and posteriors that
        are moved to another type or device, have their samples in memory again.
        """
        mapped = mapped_tensor(Path(path), "samples", self.samples)
        for row in self.rows:
            mapped[row] = self.samples[row]
        self.samples = mapped

    @torch.no_grad()
    def refresh_statistics(
        self,
        loader: Iterable[Any],
        *,
        max_batches: int | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        """Re-estimate batch-normalisation statistics for the mean and for each sample: M + 1 passes over the loader."""
        if not self.statistics.as_dict():
            return
        for row in progress([-1, *self.rows]):
            weights = self.average() if row < 0 else self._row(row)
            statistics = {name: rows[row + 1] for name, rows in self.statistics.as_dict().items()}
            estimate_statistics(self.network, self.codec.split(weights), statistics, loader, max_batches=max_batches)
        self.fresh_statistics.fill_(True)

    def chain_tensors(self, index: int) -> dict[str, Tensor]:
        """Return the present state of a chain, by name."""
        tree = self.chains[index]
        assert isinstance(tree, TensorTree)
        return tree.as_dict()

    @contextmanager
    def member(self, index: int) -> Iterator[BankPosterior]:
        """Fix the chain for a while: passes are of its present state, which is what a sampler moves; means its own."""
        with self.noise.of_member(index):
            yield self

    def noise_shares(self, chain: int | None = None) -> Tensor:
        """Return where the share of gradient noise of each chain is kept, or of one, (C,)."""
        if self.gradient_noise is None:  # from a file of before it was measured
            dtype = torch.promote_types(self.codec.dtype, torch.float32)
            self.gradient_noise = torch.full((len(self.counts),), -1.0, dtype=dtype, device=self.counts.device)
        return self.gradient_noise if chain is None else self.gradient_noise[chain : chain + 1]

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Do without the share of gradient noise where it is not among the tensors that will be loaded."""
        if "gradient_noise" not in tensors:
            self.gradient_noise = None
        elif self.gradient_noise is None:
            self.noise_shares()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.make_room({name.removeprefix(prefix): value for name, value in state_dict.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def chain_outputs(self, inputs: Any) -> Tensor:
        """Return the outputs of all chains' present states, (C, B, ...): in one vectorised pass where they allow it."""
        self.noise.guard.watch((id(self), "tensors"), self.sites)
        together = vectorised_outputs(self.network, self.chains, self.read, inputs)
        if together is not None:
            return together
        outputs = []
        for index in range(len(self.chains)):
            with self.member(index):
                outputs.append(self.outputs(inputs))
        return torch.stack(outputs)

    # -- prediction -----------------------------------------------------------------------------------------------

    def average(self) -> Tensor:
        """Return the mean of the samples, (D,); computed once for each state of the bank."""
        state = (self.samples.data_ptr(), self.samples._version, self.counts.tolist())
        if self._average is None or self._average[0] != state:
            rows = self.samples[self.rows] if len(self) < len(self.samples) else self.samples
            self._average = (state, rows.to(self._dtype()).mean(0))
        return self._average[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights, and their statistics, for the present mode."""
        noise = self.noise
        moving = noise.member is not None and not noise.keys and not noise.silent
        if self.chains and (len(self) == 0 or moving):
            return self.chain_tensors(noise.member or 0)
        if noise.silent and noise.member is not None and len(self.counts) > 1:
            return self.codec.split(self.samples[self.chain_rows()[noise.member]].to(self._dtype()).mean(0))
        if noise.silent:
            return self.codec.split(self.average()) | statistics_rows(self.network, self.statistics, 0)
        key = noise.keys[0] if noise.keys else self.keys(1, int(torch.randint(2**31, ())))[0]
        row = key.index % len(self.samples)
        return self.codec.split(self._row(row)) | statistics_rows(self.network, self.statistics, row + 1)

    def evaluate(self, inputs: Any, keys: Sequence[Key], *, tiled: bool = False) -> Tensor:
        """Evaluate samples on the same inputs, (S, B, ...): several as one vectorised pass where that is allowed."""
        norms = batch_norms(self.network).values()
        if len(keys) == 1 or tiled or len(self) == 0 or any(norm.training for norm in norms):
            return torch.cat([super(BankPosterior, self).evaluate(inputs, [key]) for key in keys])
        self.noise.guard.watch((id(self), "tensors"), self.sites)
        together = max(1, TOGETHER // self.samples.shape[1])
        with self.noise.mode(keys=tuple(keys)), self.noise.one_pass(batch_rows(inputs)):
            chunks = [keys[start : start + together] for start in range(0, len(keys), together)]
            output = torch.cat([self._vectorised(inputs, chunk) for chunk in chunks])
        if output.ndim < 2 or output.shape[1] != batch_rows(inputs):
            raise ShapeError(
                f"The network returned {tuple(output.shape[1:])} for {batch_rows(inputs)} examples. Its first output "
                "dimension must be the batch."
            )
        return output

    def _vectorised(self, inputs: Any, keys: Sequence[Key]) -> Tensor:
        size = len(self.samples)
        rows = [key.index % size for key in keys]
        weights, statistics = _take(self.samples, rows), self.statistics.as_dict()
        tensors = self.codec.split(weights.to(self._dtype()))
        tensors |= {name: _take(stats, [row + 1 for row in rows]) for name, stats in statistics.items()}
        return vectorised_pass(self.network, tensors, self.read, inputs)

    def _row(self, row: int) -> Tensor:
        return self.samples[row].to(self._dtype())

    def _dtype(self) -> torch.dtype:
        """Return the type to compute in: the parameters' own, wherever the posterior was moved to."""
        own = [self.network.get_parameter(name).dtype for name in self.codec.names]
        return own[0] if len(set(own)) == 1 else self.codec.dtype

    def keys(self, num_samples: int | None, seed: int) -> list[Key]:
        """Name rows at equal distances, the first of them by the seed; each at most once."""
        rows = self.rows or [0]
        if not bool(self.fresh_statistics[1]):
            raise ValueError(
                "The batch-normalisation statistics are older than the weights. Call "
                "posterior.refresh_statistics(train_loader), which fit does at its end."
            )
        count = min(self._count(num_samples), len(rows))
        offset = torch.rand(
            (), generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu"
        ).item()
        step = len(rows) / count
        return [Key(0, rows[int((index + offset) * step)]) for index in range(count)]

    def _check_mean(self) -> None:
        if len(self.counts) > 1 and self.noise.member is None:
            raise ValueError(
                "Chains that ran apart have no mean network: the average of their weights is none of theirs. Use "
                "how='sampling', or one chain: `with posterior.member(0), posterior.mean():`."
            )
        if len(self.counts) > 1 and len(self) and self.statistics.as_dict():
            raise ValueError("The mean of one chain has no batch-normalisation statistics. Use how='sampling'.")
        if not bool(self.fresh_statistics[0]):
            raise ValueError(
                "The bank's mean network has no batch-normalisation statistics. Call "
                "posterior.refresh_statistics(train_loader) first, or use how='sampling'."
            )

    def reference(self, inputs: Any) -> Tensor:
        """Return what the network that the chains began from returns."""
        with self.noise.lock, self.noise.mode(silent=True):
            return self.read(call(self.network, inputs))

    @property
    def folds(self) -> bool:
        """Whether samples run as batched products, which they do in networks of linear layers."""
        return runs_batched(self.network, [*self.codec.names, *self.statistics.as_dict()])

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a random parameter or re-estimated statistics."""
        return owners(self.network, [*self.codec.names, *self.statistics.as_dict()])


def _take(matrix: Tensor, rows: list[int]) -> Tensor:
    """Return rows of a matrix; without a copy where they are at equal distances."""
    steps = {after - before for before, after in pairwise(rows)}
    if len(steps) == 1 and (step := steps.pop()) > 0:
        return matrix[rows[0] : rows[-1] + 1 : step]
    return matrix[rows]
