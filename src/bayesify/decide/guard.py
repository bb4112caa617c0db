"""One object from a posterior to what to do about each input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.inputs import as_inputs
from bayesify._core.trees import batch_rows, inputs_of
from bayesify.decide.abstainer import Abstainer, examples_needed
from bayesify.decide.choosing_half import chosen
from bayesify.decide.detector import Detector
from bayesify.decide.examined import Examined, Settings, examine
from bayesify.decide.halves import halves
from bayesify.decide.monitor import Monitor
from bayesify.decide.prediction_intervals import PredictionIntervals
from bayesify.decide.scores import Combination, Score
from bayesify.decide.sets import PredictionSets, SetKind
from bayesify.decide.verdicts import ANSWER, ASK, OOD, Rules, Verdicts
from bayesify.evaluation.measures.arguments import check_share
from bayesify.laws import Posterior, require_posterior
from bayesify.likelihoods.pooling import Pooling
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction import Predictor, Views

__all__ = ["Guard"]


@dataclass(frozen=True, eq=False, repr=False)
class Guard:
    """Decide for each input: answer it, ask a person, or call it OOD; with guarantees, and reasons.

    An input is *OOD* where its score is above that of `id_acceptance` of known inputs (`Detector`); else it is
    *answered* where its uncertainty is below a threshold (`Abstainer`), and a person is *asked* where not. Every input
    also has a prediction set, or an interval.

    The validation data are cut in two by a seed. One half chooses: temperature, pooling, views, the scores, and which
    thresholds are tested in which order. The other one, which all of these are fixed numbers to, gives the promises,
    each over the draw of that half, for inputs from the distribution of the validation data:

    - the share of wrong answers among answered inputs is at most `max_risk`, with a probability of at least
      `confidence`. Given the detector's threshold, which is an order statistic of the scores, the examples below it are
      independent draws of what it lets pass, so that the abstainer's test is exact for both rules together;
    - a known input is called OOD with a probability of at most 1 - `id_acceptance`;
    - a prediction set holds the label, an interval the number, with a probability of at least `coverage`. This is over
      all inputs, not over those that are answered.

    Nothing is promised for inputs of another distribution: that is what the p-value and `Monitor` look for.

    Of numbers, an answer is wrong where it is further than `tolerance` from the target; with `max_width` in its place
    answered are those whose interval is at most that wide, and no risk is promised. For dense outputs, several outputs
    and features nothing is defined, and they are refused.

    Build it with `Guard.fit`. A guard must see inputs prepared as the validation data were.

    Attributes:
        posterior: The posterior, calibrated.
        settings: How predictions are made: predictor, draws, seed.
        score: The score that finds OOD inputs.
        uncertainty: The name of the score that decides whether to answer.
        detector: The rule for OOD inputs.
        abstainer: The rule for answers; None with `max_width`.
        sets: Sets of classes, or intervals of numbers.
        numbers: What fitting found, by name.
        class_names: What the classes are called.
        tolerance: Of numbers.
        max_width: Of numbers.

    Example:
        >>> from bayesify import convert
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(600, 2)
        >>> network = nn.Linear(2, 2, bias=False)
        >>> _ = network.weight.data.copy_(20 * torch.eye(2))
        >>> guard = Guard.fit(convert(network, "map"), [(x, x.argmax(1))], max_risk=0.05)
        >>> verdicts = guard(torch.tensor([[3.0, -3.0], [0.1, 0.1001]]))
        >>> verdicts.verdict, verdicts.label.tolist()
        (['answer', 'ood'], [0, 1])
    """

    posterior: Posterior
    settings: Settings
    score: Score
    uncertainty: str
    detector: Detector
    abstainer: Abstainer | None
    sets: PredictionSets | PredictionIntervals
    numbers: dict[str, float] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    tolerance: float | None = None
    max_width: float | None = None

    @classmethod
    def fit(
        cls,
        posterior: Posterior,
        val_loader: Iterable[Any],
        *,
        ood_loader: Iterable[Any] | None = None,
        max_risk: float = 0.01,
        confidence: float = 0.95,
        id_acceptance: float = 0.95,
        coverage: float = 0.95,
        how: str | Predictor = "sampling",
        views: Views | Sequence[Any] | str | None = None,
        num_draws: int | None = None,
        score: str | Sequence[str] = "auto",
        combination: Combination = "rank",
        uncertainty: str = "auto",
        pooling: Pooling | float = "auto",
        sets: SetKind = "split",
        condition: Literal["class"] | None = None,
        tolerance: float | None = None,
        max_width: float | None = None,
        calibrate: bool = True,
        class_names: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Guard:
        """Choose on one half of the validation data, and promise by the other.

        Args:
            posterior: Any posterior; it is calibrated in place, as `calibrate` does.
            val_loader: Batches of (inputs, targets) that were not trained on, in the same order in every round.
            ood_loader: Inputs that should be called OOD, which choose the score; they promise nothing.
            max_risk: The share of wrong answers allowed among answered inputs.
            confidence: The probability with which that must hold.
            id_acceptance: The share of known inputs that are not to be called OOD.
            coverage: The probability with which a prediction set or interval must hold the target.
            how: As in `predict`.
            views: As in `predict`; or a list of `Views`, of which the one with the least held-out NLL is taken.
            num_draws: As in `predict`.
            score: What finds OOD inputs, see `Score`: a name, several that are combined, or "auto": the one of the
                prediction's that tells `ood_loader` best from the choosing half, "total" without OOD inputs.
            combination: Of several scores: "rank" or "fisher".
            uncertainty: What decides whether to answer: one of the prediction's scores, or "auto": that with the least
                area under the risk-coverage curve on the choosing half.
            pooling: How draws are averaged, as in `calibrate`; with anything but "auto" there is one temperature.
            sets: The kind of prediction sets, see `PredictionSets`.
            condition: "class" promises their coverage for each class.
            tolerance: For numbers: the largest error of an answer that is right.
            max_width: For numbers: the widest interval of an answer.
            calibrate: Whether to fit temperature and pooling; False where the posterior is calibrated already, on
                other data than these.
            class_names: What the classes are called.
            seed: Of the halves, and of the draws.

        Raises:
            ValueError: The data are too few, or the network too bad, for what is asked; the message says which.
        """
        require_posterior(posterior)
        if tolerance is not None and max_width is not None:
            raise ValueError("tolerance and max_width are two rules for when to answer: give one of them.")
        check_share(coverage, "coverage")
        first, second = halves(val_loader, seed, function="Guard.fit")
        choice = chosen(
            posterior, first, ood_loader, how=how, views=views, num_draws=num_draws, seed=seed,
            pooling=pooling if calibrate else None,
            score=score, combination=combination, uncertainty=uncertainty, tolerance=tolerance, max_width=max_width,
        )  # fmt: skip
        other = examine(posterior, second, choice.settings, features=choice.score.needs_features)
        values = other.scores(choice.score)
        detector = Detector.fit(values, id_acceptance=id_acceptance)
        made: PredictionSets | PredictionIntervals
        if other.prediction.classes is None:
            if condition is not None:
                raise ValueError("condition='class' is for classes, and the network predicts numbers.")
            made = PredictionIntervals.fit(other.prediction, other.targets, coverage=coverage)
        else:
            made = PredictionSets.fit(
                other.prediction, other.targets, coverage=coverage, kind=sets, condition=condition
            )
        abstainer = None
        if max_width is None:
            known = choice.examined
            inside, kept = values < detector.threshold, known.scores(choice.score) < detector.threshold
            if not bool(inside.any()):
                raise ValueError(
                    f"The {choice.score.label} of every validation example is the same, so that none is known to lie "
                    "below the detector's threshold and nothing can be answered. Take a posterior whose uncertainty "
                    "differs between inputs, another score=, or for numbers max_width=."
                )
            needed = examples_needed(check_share(max_risk, "max_risk"), check_share(confidence, "confidence"))
            if int(inside.sum()) < needed:
                raise ValueError(
                    f"{int(inside.sum())} examples cannot show a risk of at most {max_risk} with confidence "
                    f"{confidence}, even without any error: that takes {needed}. Of the "
                    f"{len(known.prediction) + len(other.prediction)} validation examples one half chooses, and what "
                    f"is called OOD is not answered: give at least {math.ceil(2 * needed / id_acceptance)}, or ask "
                    "for less."
                )
            own, spare = other.correct(tolerance), known.correct(tolerance)
            abstainer = Abstainer.fit(
                other.uncertainty(choice.uncertainty)[inside],
                own[inside],
                max_risk=max_risk,
                confidence=confidence,
                monotone=False,
                holdout=(known.uncertainty(choice.uncertainty)[kept], spare[kept]),
            )
        names = None if class_names is None else tuple(map(str, class_names))
        if names is not None and len(names) != (other.prediction.classes or 0):
            raise ValueError(f"There are {len(names)} class_names for {other.prediction.classes or 0} classes.")
        guard = cls(
            posterior=posterior,
            settings=choice.settings,
            score=choice.score,
            uncertainty=choice.uncertainty,
            detector=detector,
            abstainer=abstainer,
            sets=made,
            class_names=names,
            tolerance=tolerance,
            max_width=max_width,
        )
        guard.numbers.update(guard._found(choice.examined, other), **choice.numbers)
        return guard

    def __call__(self, inputs: Any) -> Verdicts:
        """Decide for each input.

        Args:
            inputs: As in `predict`: a batch, or a loader, whose verdicts are put together in main memory.
        """
        inputs, direct = as_inputs(inputs)
        return self._decided(inputs) if direct else Verdicts.join(list(self.stream(inputs)))

    def stream(self, loader: Iterable[Any]) -> Iterator[Verdicts]:
        """Decide batch by batch, in memory that does not grow; targets in the batches are not looked at."""
        for batch in loader:
            batch = inputs_of(batch)
            if batch_rows(batch):
                yield self._decided(batch)

    def decide(self, prediction: Prediction, features: Tensor | None = None) -> Verdicts:
        """Decide by a prediction that was made as the guard's own are.

        Args:
            prediction: Of the inputs.
            features: Their features (B, D), if the score needs them.
        """
        score = self.score(prediction, features)
        uncertainty = Score((self.uncertainty,))(prediction)
        low = high = in_set = None
        broken = score.isnan() | uncertainty.isnan()
        if isinstance(self.sets, PredictionSets):
            in_set = self.sets(prediction[~broken]) if bool(broken.any()) else self.sets(prediction)
            if bool(broken.any()):  # nothing is known of what is not a number
                whole = torch.ones(len(prediction), in_set.shape[-1], dtype=torch.bool, device=in_set.device)
                whole[~broken], in_set = in_set, whole
        else:
            low, high = self.sets(prediction)
        found = self.detector(score.where(~broken, torch.inf))
        answered = (uncertainty < self.threshold) & (score < found.threshold)
        codes = torch.full_like(score, ASK, dtype=torch.long)
        codes[answered] = ANSWER
        codes[found.is_ood | broken] = OOD
        return Verdicts(
            codes=codes,
            prediction=prediction,
            p_value=found.p_value,
            score=score,
            uncertainty=uncertainty,
            in_set=in_set,
            low=low,
            high=high,
            rules=self.rules,
        )

    def monitor(self, *, false_alarm: float = 0.01) -> Monitor:
        """Return a monitor of the stream of this guard's verdicts, with no input seen yet."""
        distinct = bool((self.detector.calibration.diff() > 0).all())
        return Monitor(len(self.detector.calibration), false_alarm, two_sided=distinct)

    def _decided(self, inputs: Any) -> Verdicts:
        seen = self.settings.predicted(self.posterior, inputs, features=self.score.needs_features)
        return self.decide(*seen)

    @property
    def threshold(self) -> float:
        """Inputs with less uncertainty are answered."""
        if self.abstainer is not None:
            return self.abstainer.threshold
        assert self.max_width is not None
        quantile = float(self.sets.thresholds[0])
        # An interval is 2 q std wide, and the uncertainty of numbers is their variance.
        return (self.max_width / (2 * quantile)) ** 2 * (1 + 1e-9)

    @property
    def rules(self) -> Rules:
        """What the verdicts follow."""
        names = self.class_names or tuple(map(str, range(self.posterior_classes or 0)))
        return Rules(
            score=self.score.label,
            known=len(self.detector.calibration),
            id_acceptance=self.detector.id_acceptance,
            uncertainty=self.uncertainty,
            threshold=self.threshold,
            max_risk=None if self.abstainer is None else self.abstainer.max_risk,
            confidence=None if self.abstainer is None else self.abstainer.confidence,
            limit=self.max_width if self.abstainer is None else self.tolerance,
            classes=names,
        )

    @property
    def posterior_classes(self) -> int | None:
        """The number of classes; None for numbers."""
        found = self.numbers.get("classes")
        return None if not found else int(found)

    def _found(self, first: Examined, second: Examined) -> dict[str, float]:
        """Return what the promising half showed."""
        verdicts = self.decide(second.prediction, second.features)
        answered = verdicts.codes == ANSWER
        found: dict[str, float] = {
            "choosing": len(first.prediction),
            "promising": len(second.prediction),
            "classes": second.prediction.classes or 0,
            "answered": float(answered.double().mean()),
            "asked": float((verdicts.codes == ASK).double().mean()),
            "ood": float((verdicts.codes == OOD).double().mean()),
        }
        if verdicts.in_set is not None:
            found["set size"] = float(verdicts.in_set.sum(-1).double().mean())
        elif verdicts.low is not None and verdicts.high is not None:
            found["width"] = float((verdicts.high - verdicts.low).mean())
        if self.abstainer is not None and bool(answered.any()):
            found["risk"] = 1 - float(second.correct(self.tolerance)[answered].double().mean())
        return found

    def __repr__(self) -> str:
        """Show what it does, promises and found."""
        numbers = self.numbers
        lines = [
            f"Guard by {self.settings.described}, chosen on {int(numbers['choosing']):,} examples, promised by "
            f"{int(numbers['promising']):,}",
            f"  OOD: {self.score.label} above {self.detector.threshold:.4g}; at most "
            f"{100 * (1 - self.detector.id_acceptance):.3g} % of known inputs",
            f"  answer: {self.uncertainty} below {self.threshold:.4g}; {self.rules.promise}",
        ]
        kind = "sets" if isinstance(self.sets, PredictionSets) else "intervals"
        lines.append(f"  {kind}: hold the target of {100 * self.sets.coverage:g} % of inputs")
        shown = ", ".join(f"{name} {numbers[name]:.3f}" for name in _SHOWN if name in numbers)
        return "\n".join([*lines, f"  found: {shown}"])

    def save(self, path: str | Path) -> None:
        """Save the guard with its posterior in one folder; a reader finds the old guard or the new one, whole."""
        from bayesify.decide.guard_files import save_guard

        save_guard(self, path)

    @classmethod
    def load(cls, path: str | Path, network: nn.Module, *, probe: bool = True) -> Guard:
        """Load a guard onto the network that its posterior was made from.

        Args:
            path: The folder that `save` made.
            network: As in `bayesify.load`, which refuses another one.
            probe: As in `bayesify.load`.
        """
        from bayesify.decide.guard_files import load_guard

        return load_guard(path, network, probe=probe)


_SHOWN = ("answered", "asked", "ood", "risk", "set size", "width")
