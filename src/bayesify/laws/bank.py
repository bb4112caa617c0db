"""A bank: weight samples, stored once as a matrix of only what is random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesify._core.random import Key
from bayesify.laws.components import Component
from bayesify.laws.law import Law, check_count, register_law
from bayesify.laws.low_rank import leading, low_rank_component
from bayesify.laws.mapped import mapped_tensor
from bayesify.laws.passes import Pass, Patch, Refusal
from bayesify.laws.stacking import Stack, Stacking
from bayesify.laws.tensors import Codec, batch_norms
from bayesify.laws.trace import Trace, storage

__all__ = ["STORAGE", "BankLaw", "Storage", "check_storage"]

MOST_DRAWS = 100  # of a prediction, unless the caller says
Storage = Literal["float32", "bfloat16", "float16"]
STORAGE: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@register_law
class BankLaw(Law):
    """The empirical distribution of weight samples, q = (1/M) sum_m delta(w - w_m).

    Samples are the rows of one matrix (M, D), in float32 or half precision; the rest of the network is there once.
    A prediction over T of them costs T plain passes, and far less for networks of linear layers at small batches, where
    they run as batched products. Draws are rows at equal distances, so fewer draws than rows are a thinned bank.
    Rows come in groups of equal size, one for each chain that made them. Batch-normalisation statistics are kept for
    each row and for the mean.

    Args:
        network: The network.
        names: The random parameters, in the order of the columns.
        size: The number M of rows that there is room for.
        groups: How many groups the rows are in.
        dtype: Of the matrix; None takes the parameters' own.
        source: The method that the samples come from, for files.

    Attributes:
        gradient_noise: Of each chain, in variances of the injected noise; negative where it was not measured.
    """

    name = "bank"
    old_settings: ClassVar[dict[str, str]] = {"num_samples": "bank_size"}
    settings: ClassVar[dict[str, Any]] = {
        "bank_size": int,
        "chains": int,
        "storage": str | None,
        "names": list[str],
        "source": str,
    }
    stacks = True
    made = False
    samples: Tensor
    counts: Tensor
    num_data: Tensor
    gradient_noise: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        *,
        names: Sequence[str],
        size: int,
        groups: int = 1,
        dtype: torch.dtype | None = None,
        source: str = "",
    ) -> None:
        super().__init__(network)
        if size < 1 or size % groups:
            raise ValueError(f"A bank of {size} rows cannot be shared by {groups} chains evenly.")
        self.codec = Codec(network, names)
        self.source = source
        device = next(network.parameters()).device
        rows = torch.zeros(size, sum(self.codec.sizes), dtype=dtype or self.codec.dtype, device=device)
        self.register_buffer("samples", rows)
        self.register_buffer("counts", torch.zeros(groups, dtype=torch.long, device=device))
        self.register_buffer("num_data", torch.zeros((), dtype=torch.long, device=device))
        dtype = torch.promote_types(self.codec.dtype, torch.float32)
        self.register_buffer("gradient_noise", torch.full((groups,), -1.0, dtype=dtype, device=device))
        self.statistics_rows = size
        self.default_draws = min(size, MOST_DRAWS)
        self._average: tuple[Any, Tensor] | None = None
        self._named: tuple[Any, list[Key]] | None = None
        self._views: tuple[Any, dict[str, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what is only for speed: views would be copied and written as often as there are tensors."""
        return {**self.__dict__, "_named": None, "_views": None}

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the random parameters."""
        return self.codec.names

    def sites(self) -> set[nn.Module]:
        """Return the modules that own a random parameter, and those with statistics of their own for each draw."""
        return super().sites() | set(batch_norms(self.network).values())

    # -- filling ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of samples that there are."""
        return int(self.counts.sum())

    def __bool__(self) -> bool:
        """Return True: a bank without samples is a bank."""
        return True

    @property
    def functions(self) -> int | None:  # type: ignore[override]
        """How many samples there are."""
        return max(1, len(self))

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
        self.changed()

    @property
    def learned(self) -> Any:
        """True once there are samples; before, what to call."""
        if bool(self.counts.any()):
            return True
        return Refusal(
            "no sample has been kept. bayesify.fit(posterior, loader) runs the chains; in a loop of your own "
            "bayesify.Learner has the sampler, and keeps samples in its after_step()."
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

    # -- prediction -----------------------------------------------------------------------------------------------

    def average(self) -> Tensor:
        """Return the mean of the samples, (D,); computed once for each state of the bank."""
        state = (self.samples.data_ptr(), self.samples._version, self.counts.tolist())
        if self._average is None or self._average[0] != state:
            rows = self.samples[self.rows] if len(self) < len(self.samples) else self.samples
            self._average = (state, rows.to(self._dtype()).mean(0))
        return self._average[1]

    def patch(self, p: Pass) -> Patch:
        """Return the weights of a sample, or the mean's; the network's own as long as there are none."""
        if len(self) == 0:
            return Patch(self.own.as_dict())
        if p.kind == "mean" and isinstance(p.part, int) and len(self.counts) > 1:
            weights = self.samples[self.chain_rows()[p.part]].to(self._dtype()).mean(0)
        elif p.kind == "mean":
            weights = self.average()
        else:
            if not p.keys:
                p.keys = (self.keys(1, int(torch.randint(2**31, ())))[0],)
            weights = self._row(self.row_of(p.key))
        return Patch({**self.own.as_dict(), **self.codec.split(weights)})

    def statistics_row(self, p: Pass) -> int | None:
        """Return the row of the statistics; the network's own as long as there are no samples."""
        return None if len(self) == 0 else super().statistics_row(p)

    def row_of(self, key: Key) -> int:
        """Return the row of a draw."""
        return key.index % len(self.samples)

    def row_weights(self, row: int) -> dict[str, Tensor]:
        """Return the weights that a row of the statistics belongs to."""
        return self.codec.split(self._row(row - 1) if row else self.average())

    def rows_to_refresh(self) -> list[int]:
        """Return the rows of the mean and of the samples that there are."""
        return [0, *(row + 1 for row in self.rows)]

    def stacking(self, trace: Trace | None) -> Stacking | None:
        """Return how layers have the weights of several samples, once there are some."""
        return super().stacking(trace) if len(self) else None

    def stacked(self, keys: Sequence[Key]) -> dict[str, Stack]:
        """Return samples as stacked tensors, without a copy where they are at equal distances."""
        # Views show what is written to the matrix, so that they hold as long as it is the same memory.
        state = (self.samples.data_ptr(), self.samples.shape, self._dtype(), tuple(keys))
        if self._views is not None and self._views[0] == state:
            return dict(self._views[1])
        size = len(self.samples)  # once: a bank has hundreds of rows
        found = self.codec.split(_take(self.samples, [key.index % size for key in keys]).to(self._dtype()))
        shared = all(storage(tensor) == storage(self.samples) for tensor in found.values())
        self._views = (state, found) if shared and not torch.is_grad_enabled() else None
        return dict(found)

    @torch.no_grad()
    def components(self, trace: Trace | None = None) -> list[Component] | Refusal:
        """Return one Gaussian with the moments of the samples, of a hundred at equal distances where there are more."""
        del trace
        rows = self.rows
        if not rows:
            return Refusal(
                "There are no samples yet, and so no variances of weights. bayesify.fit(posterior, loader) runs the "
                "chains; until then how='sampling' is the network as it is."
            )
        step = max(1.0, len(rows) / MOST_DRAWS)
        some = _take(self.samples, [rows[int(index * step)] for index in range(int(len(rows) / step))])
        mean = self.average()
        columns, left = leading((some.to(self._dtype()) - mean) / len(some) ** 0.5)
        return [low_rank_component(self.codec, mean, left, columns)]

    def _row(self, row: int) -> Tensor:
        return self.samples[row].to(self._dtype())

    def _dtype(self) -> torch.dtype:
        """Return the type to compute in: the parameters' own, wherever the posterior was moved to."""
        own = [self.network.get_parameter(name).dtype for name in self.codec.names]
        return own[0] if len(set(own)) == 1 else self.codec.dtype

    def check_part(self, part: int) -> None:
        """Raise unless there is such a chain."""
        if not 0 <= part < len(self.counts):
            raise IndexError(f"There is no chain {part}: there are {len(self.counts)}, from 0 on.")

    def keys(self, num_draws: int | None, seed: int) -> list[Key]:
        """Name rows at equal distances, the first of them by the seed; each at most once."""
        wanted = (check_count(num_draws, self.default_draws), seed, len(self.samples), self.counts.tolist())
        if self._named is None or self._named[0] != wanted:
            rows = self.rows or [0]
            count = min(wanted[0], len(rows))
            offset = torch.rand(
                (), generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu"
            ).item()
            step = len(rows) / count
            self._named = (wanted, [Key(0, rows[int((index + offset) * step)]) for index in range(count)])
        return list(self._named[1])

    def has_mean(self, part: Any = None) -> Any:
        """Return whether the samples, or those of a chain, have a mean network."""
        if len(self.counts) > 1 and part is None:
            return Refusal(
                "Chains that ran apart have no mean network: the average of their weights is none of theirs. Use "
                "how='sampling', or one chain: `with posterior.member(0), posterior.mean():`."
            )
        if len(self.counts) > 1 and len(self) and batch_norms(self.network):
            return Refusal("The mean of one chain has no batch-normalisation statistics. Use how='sampling'.")
        return True

    # -- files ----------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the settings."""
        stored = [name for name, dtype in STORAGE.items() if dtype == self.samples.dtype]
        plain = self.samples.dtype == self.codec.dtype
        return {
            "bank_size": len(self.samples),
            "chains": len(self.counts),
            "storage": None if plain or not stored else stored[0],
            "names": list(self.names),
            "source": self.source,
        }

    @classmethod
    def build(cls, network: nn.Module, config: Mapping[str, Any]) -> BankLaw:
        """Make room for the samples."""
        return cls(
            network,
            names=config["names"],
            size=config["bank_size"],
            groups=config["chains"],
            dtype=STORAGE[config["storage"]] if config["storage"] else None,
            source=config["source"],
        )

    def described(self) -> str:
        """Return what the law is called in sentences."""
        return "A bank of weight samples"


def check_storage(storage: str | None) -> None:
    """Raise where a type of stored samples is unknown."""
    if storage is not None and storage not in STORAGE:
        raise ValueError(f"storage must be one of {sorted(STORAGE)} or None, but it is {storage!r}.")


def _take(matrix: Tensor, rows: list[int]) -> Tensor:
    """Return rows of a matrix; without a copy where they are at equal distances."""
    steps = {after - before for before, after in pairwise(rows)}
    if len(steps) == 1 and (step := steps.pop()) > 0:
        return matrix[rows[0] : rows[-1] + 1 : step]
    return matrix[rows]
