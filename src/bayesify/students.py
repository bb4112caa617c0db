"""One network out of many: a student that has its teacher's prediction and its uncertainty in one pass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bayesify._core.deprecation import renamed, warn_renamed, with_new_keys
from bayesify.conversion import build
from bayesify.fitting import fit
from bayesify.laws import LossTerms, Pass, Posterior, StudentLaw, require_posterior
from bayesify.laws.laplace import last_linear
from bayesify.likelihoods import Categorical, Gaussian, Likelihood
from bayesify.likelihoods.softmax_integrals import average_logs
from bayesify.methods import Method, Stage, inherit
from bayesify.methods.distillation import distill as distill_weights
from bayesify.methods.method import Schedule
from bayesify.prediction import predict
from bayesify.selection import Conversion, Selection, select_parameters

__all__ = ["Lesson", "class_information", "distill", "distill_network", "lesson_of", "new_student"]

LEAST = 1e-10  # nats, and variances


@renamed(how="algorithm", bank="posterior")
def distill(
    posterior: Posterior, algorithm: str = "wgan-gp", *, loader: Iterable[Any] | None = None, **options: Any
) -> Posterior:
    """Make a smaller posterior that does as another: a generator of weights, or one network.

    Args:
        posterior: For "network" any posterior, calibrated if it can be; for the others a bank, see `sample_bank`.
        algorithm: "network", one student that predicts, and is uncertain, in one pass as the posterior does in many:
            `distill_network`; or what makes weights like those of a bank: `methods.distillation.distill`, "wgan-gp",
            "wgan", "gan", "pca", "mixture" or "swag".
        loader: Training batches.
        options: Of these two functions.

    Returns:
        A posterior like any other.

    Example:
        >>> from bayesify import ensemble, predict
        >>> teacher = ensemble([nn.Linear(2, 3) for _ in range(4)])
        >>> x = torch.randn(32, 2)
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(32) % 3), 8)
        >>> student = distill(teacher, "network", loader=loader, epochs=1, progress=False)
        >>> prediction = predict(student, x, how="streamlined")
        >>> bool((prediction.epistemic > 0).all()), prediction.predictor[:11]
        (True, 'closed form')
    """
    if algorithm == "network":
        return distill_network(posterior, loader, **options)
    if "num_draws" in options:  # which is a student's own
        warn_renamed("num_draws= of distill", "num_bn_draws=", stacklevel=4)
        options = with_new_keys(options, {"num_draws": "num_bn_draws"})
    return distill_weights(posterior, algorithm, loader=loader, **options)  # type: ignore[arg-type]


def distill_network(
    teacher: Posterior,
    loader: Iterable[Any] | None,
    *,
    network: nn.Module | None = None,
    layer: str | None = None,
    epochs: int = 10,
    lr: float = 0.05,
    weight_decay: float = 5e-4,
    schedule: Schedule = "cosine",
    mix: float = 0.0,
    num_draws: int | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    **options: Any,
) -> Posterior:
    """Train one network that has a posterior's prediction and mutual information in one pass.

    The student's logits are N(f(x), diag s(x)^2), see `StudentLaw`. With p the teacher's draws, tempered and on its
    views, q the student's softmax, and bars for averages, it minimises, in nats of each example,

        KL(pbar || qbar) + sum_c D(J_c[p] || J_c[q]),  J_c[p] = mean(p_c ln p_c) - pbar_c ln pbar_c,
        D(a || b) = a ln(a / b) - a + b,

    where pbar is the teacher's pooled prediction. J_c >= 0 is what class c adds to the mutual information, which is
    their sum, so that both terms are zero where the prediction and the information agree, class by class. For numbers
    it is the divergence of two Gaussians, of the teacher's draws and of the student's outputs. Ensemble distribution
    distillation (Malinin et al. 2020) asks for the likelihood of the draws under a Dirichlet instead, whose gradients
    vanish or explode where draws are nearly one-hot.

    A step costs the teacher's prediction, S passes, and a plain training step; a prediction one plain pass.

    Args:
        teacher: Any posterior for classes or numbers; its temperatures, pooling and views are what is imitated.
        loader: Training batches (inputs, targets), augmented as you like: the teacher sees what the student sees.
            Targets say which positions count.
        network: What the student starts from; None takes the teacher's network.
        layer: Its last linear layer; None finds it.
        epochs: Of the loader.
        lr: Of SGD with Nesterov's momentum.
        weight_decay: Of the network, never of the variances.
        schedule: Of the rate, see `Method`.
        mix: If positive, teacher and student see sums of two inputs, l x + (1 - l) x', l ~ Beta(mix, mix): on the
            training inputs themselves the teacher's members may be as sure as they are of nothing else.
        num_draws: Of the teacher for each batch; None takes its own number.
        checkpoint: A folder; a run that was interrupted goes on.
        seed: Of the order of the data, and of the teacher's draws.
        options: Of `fit`.

    Returns:
        The student: `predict(student, x, how="streamlined")` is one pass, with total, aleatoric and epistemic
        uncertainty; `predict(student, x)` draws, and computes all but the last layer once.
    """
    if loader is None:
        raise ValueError("A student learns from data: distill(posterior, 'network', loader=train_loader).")
    student = new_student(
        teacher, network=network, layer=layer, num_draws=num_draws, draw_seed=seed, epochs=epochs, lr=lr,
        weight_decay=weight_decay, schedule=schedule, mix=mix,
    )  # fmt: skip
    fit(student, loader, seed=seed, checkpoint=checkpoint, **options)
    student.method = None
    return student.eval()


def new_student(
    teacher: Posterior,
    *,
    network: nn.Module | None = None,
    layer: str | None = None,
    epochs: int = 10,
    lr: float = 0.05,
    weight_decay: float = 5e-4,
    schedule: Schedule = "cosine",
    mix: float = 0.0,
    num_draws: int | None = None,
    draw_seed: int = 0,
) -> Posterior:
    """Return a student that has learnt nothing yet, for a `fit` of your own: with callbacks, or compiled.

    Args:
        teacher: Any posterior for classes or numbers.
        network: What the student starts from; None takes the teacher's network.
        layer: Its last linear layer; None finds it.
        epochs: What `fit` takes if it is not told.
        lr: Of SGD with Nesterov's momentum.
        weight_decay: Of the network, never of the variances.
        schedule: Of the rate, see `Method`.
        mix: How inputs are mixed, see `distill_network`.
        num_draws: Of the teacher for each batch; None takes its own number.
        draw_seed: Of the teacher's draws.

    Example:
        >>> from bayesify import ensemble
        >>> student = new_student(ensemble([nn.Linear(2, 3) for _ in range(4)]), epochs=2)
        >>> student.law.name, student.method.epochs
        ('student', 2)
    """
    require_posterior(teacher)
    if not 0 <= mix < float("inf"):
        raise ValueError(f"mix is the parameter of Beta(mix, mix), or 0 to mix nothing, but it is {mix}.")
    likelihood = _student_likelihood(teacher.likelihood)
    start = teacher.plain_network() if network is None else network
    last = last_linear(start.named_modules()) if layer is None else layer
    if last is None:
        raise ValueError(
            "A student has its variances from the inputs of a last nn.Linear, and this network has none. Give a "
            "network that has: distill(posterior, 'network', loader=..., network=...)."
        )
    method = _Imitation(
        teacher=teacher, layer=last, num_draws=num_draws, draw_seed=draw_seed, epochs=epochs, lr=lr,
        weight_decay=weight_decay, schedule=schedule, mix=mix,
    )  # fmt: skip
    # A teacher may have frozen its network, whose members it trains; the student's learns.
    held = teacher.frozen if network is None else None
    student = build(start, method, Selection(None, None), likelihood, frozen=held)
    table, output_key = student.conversion, teacher.output_key
    inherit(student, teacher)
    student.conversion, student.likelihood, student.output_key = table, likelihood, output_key
    student.law.condition(likelihood)
    return student


def _student_likelihood(likelihood: Likelihood) -> Likelihood:
    """Return a likelihood like the teacher's, without its calibration, which is in what is imitated."""
    made = copy.deepcopy(likelihood)
    if type(made) is Categorical:
        made.temperature, made.exponent = torch.ones_like(made.temperature.flatten()[0]), 1.0
    elif type(made) is not Gaussian or made.noise_std == "head":
        raise ValueError(
            f"A student is for classes (softmax) and for numbers with one output each, and this is {likelihood}. "
            "Keep the posterior, or export it."
        )
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    return made


# -- what is taught ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """What a teacher says about a batch.

    Attributes:
        mean: Pooled probabilities, or the mean of the draws' numbers, (B, ..., C).
        spread: What each class adds to the mutual information, or the variance of the numbers, (B, ..., C).
    """

    mean: Tensor
    spread: Tensor


def lesson_of(teacher: Posterior, inputs: Any, *, num_draws: int | None = None, seed: int = 0) -> Lesson:
    """Return what a posterior's draws say about inputs, on its views and with its calibration.

    Example:
        >>> from bayesify import ensemble
        >>> lesson = lesson_of(ensemble([nn.Linear(2, 3) for _ in range(4)]), torch.randn(5, 2))
        >>> lesson.mean.shape, bool((lesson.spread >= 0).all())
        (torch.Size([5, 3]), True)
    """
    found: Any = predict(teacher, inputs, num_draws=num_draws, seed=seed, keep_samples=True)
    if type(teacher.likelihood) is Categorical:
        return Lesson(found.probs, class_information(found.samples))
    variance, mean = torch.var_mean(found.samples, 0, correction=0)
    return Lesson(mean, variance)


def class_information(probs: Tensor) -> Tensor:
    """Return J_c = mean(p_c ln p_c) - pbar_c ln pbar_c of draws (S, B, ..., C): its sum is the mutual information.

    >>> float(class_information(torch.eye(2)[:, None]).sum())  # nats: two draws that are sure of different classes
    0.693
    """
    mean = probs.mean(0)
    return (torch.xlogy(probs, probs).mean(0) - torch.xlogy(mean, mean)).clamp_min(0)


@dataclass(frozen=True, kw_only=True)
class _Imitation(Method):
    """How a student learns; no method of its own, since it cannot be without its teacher."""

    name = "imitation"
    trains_draws = False

    teacher: Posterior = field(repr=False, compare=False)
    layer: str
    num_draws: int | None = None
    draw_seed: int = 0
    mix: float = 0.0

    def build(self, network: nn.Module, selection: Selection) -> tuple[StudentLaw, Conversion]:
        """Give the network a head of variances."""
        _, table = select_parameters(network, selection, how="")
        rows = [
            dataclasses.replace(row, converted=own, reason="outputs with variances" if own else "trained, not random")
            for row in table.rows
            for own in [row.name == self.layer]
        ]
        return StudentLaw(network, layer=self.layer), Conversion(tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, which checkpoints compare."""
        fields = [one.name for one in dataclasses.fields(self) if one.name != "teacher"]
        return {"name": self.name, "version": self.version, **{name: getattr(self, name) for name in fields}}

    def stages(self, posterior: Posterior) -> list[Stage]:
        """Return one stage; the head of variances has no weight decay."""
        own = [parameter for parameter in posterior.network.parameters() if parameter.requires_grad]
        head = cast(StudentLaw, posterior.law).head
        return [Stage("student", [{"params": own}, {"params": list(head.parameters()), "weight_decay": 0.0}])]

    def objective(self, posterior: Posterior, inputs: Any, targets: Any, num_data: int) -> LossTerms:
        """Return how far the student's prediction and its uncertainty are from the teacher's."""
        del num_data
        inputs = _mixed(inputs, self.mix) if self.mix else inputs
        with torch.no_grad():
            lesson = lesson_of(self.teacher, inputs, num_draws=self.num_draws, seed=self.draw_seed)
        output, features = _outputs_and_features(posterior, self.layer, inputs)
        variance = cast(StudentLaw, posterior.law).variance(features).reshape(output.shape)
        classes = type(posterior.likelihood) is Categorical
        terms = (_class_terms if classes else _number_terms)(output, variance, lesson)
        counted = posterior.likelihood.weight(targets) if classes else None
        return LossTerms({name: _average(term, counted) for name, term in terms.items()})


def _mixed(inputs: Any, concentration: float) -> Tensor:
    """Return l x + (1 - l) x', x' another example of the batch, l ~ Beta(concentration, concentration) for each."""
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        raise ValueError(
            "mix= adds inputs up, so that they must be one tensor of real numbers, as images and tables are. For "
            "others take mix=0, and a loader that changes its inputs."
        )
    share = torch.distributions.Beta(concentration, concentration).sample((len(inputs),)).to(inputs)
    others = inputs[torch.randperm(len(inputs)).to(inputs.device)]
    return torch.lerp(others, inputs, share.reshape(-1, *(1,) * (inputs.ndim - 1)))


def _class_terms(output: Tensor, variance: Tensor, lesson: Lesson) -> dict[str, Tensor]:
    """Return both divergences of each example, (B, ...)."""
    classes = output.shape[-1]
    flat, rows = output.reshape(-1, classes), output.shape[0]
    positions = max(1, len(flat) // max(1, rows))
    log_mean, log_squares = average_logs(flat, variance.reshape(-1, classes).sqrt(), positions=positions)
    wanted, spread = (tensor.reshape(-1, classes).to(flat.dtype) for tensor in (lesson.mean, lesson.spread))
    own = (log_squares - log_mean.exp() * log_mean).clamp_min(0) + LEAST
    prediction = (torch.xlogy(wanted, wanted) - wanted * log_mean).sum(-1)
    information = (torch.xlogy(spread, (spread + LEAST) / own) - spread + own).sum(-1)
    shape = output.shape[:-1]
    return {"prediction": prediction.reshape(shape), "information": information.reshape(shape)}


def _number_terms(output: Tensor, variance: Tensor, lesson: Lesson) -> dict[str, Tensor]:
    """Return KL(N(mean, spread) || N(output, variance)) of each number, in the means' and in the variances' part."""
    mean, spread = (tensor.reshape(output.shape).to(output.dtype) for tensor in (lesson.mean, lesson.spread))
    ratio = (spread + LEAST) / (variance + LEAST)
    return {
        "prediction": 0.5 * (mean - output).square() / (variance + LEAST),
        "information": 0.5 * (ratio - 1 - ratio.log()),
    }


def _average(term: Tensor, counted: Tensor | None) -> Tensor:
    if counted is None or counted.shape != term.shape:
        return term.mean()
    return (term * counted).sum() / counted.sum().clamp_min(1)


def _outputs_and_features(posterior: Posterior, layer: str, inputs: Any) -> tuple[Tensor, Tensor]:
    """Run the mean network once, with gradients; return its outputs and what its last layer saw."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        seen.append((args[0] if args else kwargs["input"], output))

    handle = posterior.network.get_submodule(layer).register_forward_hook(keep, with_kwargs=True)
    try:
        output = posterior.outputs(inputs, Pass("mean"))
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0][1].shape != output.shape:
        raise ValueError(
            f"The output of {layer!r} is not the network's: it is called {len(seen)} times, or changed afterwards, or "
            "another layer comes last. Say which is last: distill(posterior, 'network', loader=..., layer=...)."
        )
    return output, seen[0][0]
