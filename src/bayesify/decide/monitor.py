"""A test for drift that may be looked at at any time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.decide._binomial import upper_bound
from bayesify.decide._state import check_state
from bayesify.decide.verdicts import VERDICTS, Verdicts
from bayesify.evaluation.measures.arguments import check_count, check_share, to_double

if TYPE_CHECKING:
    from bayesify.evaluation.measures.arguments import ArrayLike

__all__ = ["Monitor"]

TAILS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # shares of known inputs whose rates are watched
RATIOS = (1.5, 3.0, 8.0)  # how much more frequent they may have become
HOLD = 10.0  # inputs, about, in which the first half of the capital is at stake
_FIELDS = {
    "known",
    "false_alarm",
    "two_sided",
    "seen",
    "counts",
    "log_cash",
    "log_arms",
    "log_best",
    "starts",
    "alarmed_at",
}


@dataclass(eq=False)
class Monitor:
    """Watch p-values of inputs as they come, and say when the data have left those that a guard knows.

    Under the null hypothesis that all inputs are draws of the known distribution, an alarm is ever raised, in however
    long a stream and however often one looks, with a probability of at most `false_alarm`. Detection is by betting
    (an e-process, Ville 1939; Shafer and Vovk 2019):

    - Events A_k: the p-value is among the lowest (and, with `two_sided`, the highest) (m + 1) / (n + 1), of n
      calibration scores. P(A_k) is unknown, but follows a Beta(m + 1, n - m) distribution over calibration sets, whose
      quantile b_k is exceeded with a probability of at most false_alarm / 2 for all k together. One fixed set of n
      scores would otherwise raise an alarm in the end by its own luck.
    - A bet on A_k having the probability q > b_k multiplies its capital by q / b_k where A_k happens and by
      (1 - q) / (1 - b_k) where not, which no gambler gains by while P(A_k) <= b_k. q is 1.5, 3 and 8 b_k.
    - Of a capital of one, the part that is not at stake yet is put on all bets alike, 1 / (10 + t) of it before the
      t-th input, so that a late change finds capital too. The alarm is raised at a capital of 2 / false_alarm.

    A drift that moves none of the rates above their b_k, which is within what the calibration set leaves open, is not
    found. The state does not grow; `to_dict` and `from_dict` keep it.

    Attributes:
        known: The number n of calibration scores.
        false_alarm: The probability of ever raising an alarm without a cause.
        two_sided: Whether inputs that look too familiar count too; only for scores that are never equal.
        seen: Inputs so far.
        counts: Of verdicts so far, by name, where verdicts were given.
        alarmed_at: How many inputs had been seen when the alarm was raised; None before.

    Example:
        >>> monitor = Monitor(known=2000, false_alarm=0.01)
        >>> monitor.update(torch.rand(1000, generator=torch.Generator().manual_seed(0)))
        False
        >>> monitor.update(torch.full((20,), 0.002)), 950 < monitor.changed_at <= 1000
        (True, True)
    """

    known: int
    false_alarm: float = 0.01
    two_sided: bool = False
    seen: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))
    alarmed_at: int | None = None
    log_cash: float = 0.0
    log_arms: Tensor = field(default_factory=lambda: torch.empty(0))
    log_best: Tensor = field(default_factory=lambda: torch.empty(0))
    starts: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        """Find the bets."""
        check_count(self.known, "known")
        check_share(self.false_alarm, "false_alarm")
        ranks = sorted({math.floor(tail * (self.known + 1)) - 1 for tail in TAILS} - {-1})
        if not ranks:
            raise ValueError(f"{self.known} known inputs are too few to watch rates by: give at least 4.")
        sides = 2 if self.two_sided else 1
        level = self.false_alarm / 2 / (sides * len(ranks))
        bounds = torch.tensor([upper_bound(rank, self.known, level) for rank in ranks], dtype=torch.float64)
        self._ranks = torch.tensor(ranks).repeat(sides)
        self._high = torch.arange(sides).repeat_interleave(len(ranks)).bool()
        # (bets, events): what a bet is multiplied by, as logarithms.
        odds = (bounds.repeat(sides)[None] * torch.tensor(RATIOS, dtype=torch.float64)[:, None]).clamp_max(0.9)
        kept = odds > bounds.repeat(sides)
        self._event = torch.arange(len(self._ranks)).expand(len(RATIOS), -1)[kept]
        bound = bounds.repeat(sides)[self._event]
        self._gain, self._loss = (odds[kept] / bound).log(), ((1 - odds[kept]) / (1 - bound)).log()
        if self.log_arms.numel() == 0:
            self.log_arms = torch.full_like(self._gain, -math.inf)
            self.log_best = torch.full_like(self._gain, -math.inf)
            self.starts = torch.zeros_like(self._event)

    @property
    def alarm(self) -> bool:
        """Whether the data have left."""
        return self.alarmed_at is not None

    @property
    def evidence(self) -> float:
        """The capital now, as a logarithm: 0 in the beginning; the alarm is raised at ln(2 / false_alarm)."""
        return float(torch.logaddexp(self.log_arms.logsumexp(0), torch.tensor(self.log_cash, dtype=torch.float64)))

    @property
    def changed_at(self) -> int | None:
        """How many inputs came before the change, as the bet with the largest capital has it; None without an alarm."""
        return int(self.starts[self.log_arms.argmax()]) if self.alarm else None

    @torch.no_grad()
    def update(self, inputs: Verdicts | ArrayLike) -> bool:
        """Look at the next inputs, in their order.

        Args:
            inputs: Verdicts, or p-values (B,) of the same calibration set.

        Returns:
            Whether an alarm was raised, now or before.
        """
        if isinstance(inputs, Verdicts):
            if inputs.rules.known != self.known:
                raise ValueError(f"The verdicts are of {inputs.rules.known} known inputs, the monitor of {self.known}.")
            for code, name in enumerate(VERDICTS):
                self.counts[name] += int((inputs.codes == code).sum())
            inputs = inputs.p_value
        values = to_double(inputs, "p-values").detach().cpu().flatten()
        if bool(((values <= 0) | (values > 1)).any()):
            raise ValueError("p-values must be above 0 and at most 1.")
        for part in torch.split(values, 4096):
            self._bet(part)
        return self.alarm

    def _bet(self, values: Tensor) -> None:
        # Ranks among n calibration scores: p = (1 + #{known >= score}) / (n + 1).
        above = (values * (self.known + 1)).ceil().long() - 1
        happened = torch.where(self._high, self.known - above[:, None] <= self._ranks, above[:, None] <= self._ranks)
        factors = torch.where(happened[:, self._event], self._gain, self._loss).cumsum(0)  # (T, bets)
        times = torch.arange(self.seen, self.seen + len(values), dtype=torch.float64)
        stakes = 1 / (HOLD + times)
        left = torch.log1p(-stakes).cumsum(0) + self.log_cash
        before = torch.cat([torch.tensor([self.log_cash], dtype=torch.float64), left[:-1]])
        staked = (before + stakes.log() - math.log(factors.shape[1]))[:, None]
        # A_t = (A_(t-1) + s_t) f_t, whose solution is P_t (A_0 + sum_(s <= t) s_s / P_(s-1)), P the product of the f.
        ratio = staked - torch.cat([torch.zeros_like(factors[:1]), factors[:-1]])
        arms = factors + torch.logaddexp(self.log_arms, ratio.logcumsumexp(0))
        capital = torch.logaddexp(arms.logsumexp(1), left)
        crossed = (capital >= math.log(2 / self.false_alarm)).nonzero().flatten()
        if self.alarmed_at is None and len(crossed):
            self.alarmed_at = self.seen + int(crossed[0]) + 1
        best, when = ratio.max(0)
        later = best > self.log_best
        self.starts = torch.where(later, self.seen + when, self.starts)
        self.log_best = torch.where(later, best, self.log_best) + factors[-1]
        self.log_arms, self.log_cash = arms[-1], float(left[-1])
        self.seen += len(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values; numbers survive exactly."""
        values = {name: getattr(self, name) for name in sorted(_FIELDS)}
        plain = {
            name: [None if item == -math.inf else item for item in value.tolist()]
            if isinstance(value, Tensor)
            else value
            for name, value in values.items()
        }
        return {"kind": "Monitor", "version": 1, **plain}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Monitor:
        """Rebuild a monitor from `to_dict`; it goes on as if it had never stopped."""
        check_state(state, kind="Monitor", fields=_FIELDS)
        values = {name: state[name] for name in _FIELDS}
        for name in ("log_arms", "log_best"):
            items = [-math.inf if item is None else item for item in values[name]]
            values[name] = torch.tensor(items, dtype=torch.float64)
        made = cls(**{**values, "starts": torch.tensor(values["starts"]), "counts": dict(values["counts"])})
        if len(made.log_arms) != len(made._gain):
            raise ValueError("The monitor's state is of other bets. Save and load it with one version of bayesify.")
        return made
