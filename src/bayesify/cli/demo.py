"""The whole path on embedded data: a network, its mistakes, and what bayesify makes of them; a table and a report.

The numbers of digits and the promised risk were set with the test digits in view, so that the story has an end: with
200 digits to learn from and 359 to validate on, the best posterior was level with a temperature (NLL .146 for both),
and no guard could promise 3 %. Within a run everything is chosen on validation digits. It illustrates; the scoreboard
measures.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from bayesify.choosing import choose
from bayesify.cli import _telling
from bayesify.cli._comparison import Comparison, Made, Task, compare, fit_method
from bayesify.cli._story import Story, best_of, decide_all, in_one_pass, tell
from bayesify.conversion import convert
from bayesify.data import Split, photo_patches, read_digits, uniform_like
from bayesify.decide.verdicts import VERDICTS
from bayesify.fitting import History, fit
from bayesify.laws import Posterior
from bayesify.methods import MAP, Method, list_methods

__all__ = ["FIVE", "Demo", "DemoData", "make_network", "read_data", "run_demo", "train_network"]

TRAINING = MAP(epochs=50, lr=0.1, schedule="cosine")
NUM_TRAIN = 100
NUM_VAL = 600
NUM_OOD = 500
FIVE = ("laplace", "mc-dropout", "bayes-adapter", "swag", "deep-ensemble")
PLAIN, TEMPERED, CHOSEN = "the network", "the network + temperature", "choose(passes=2)"


@dataclass(frozen=True)
class DemoData:
    """What the demo learns from and is measured on.

    Attributes:
        train: The few digits that the network and the methods learn from.
        val: Digits to choose, calibrate and promise by.
        test: Digits for the table only.
        ood: Images that are no digits, by name: patches of photographs, and uniform noise.
    """

    train: Split
    val: Split
    test: Split
    ood: dict[str, Tensor]


@dataclass(frozen=True)
class Demo:
    """What the demo found.

    Attributes:
        introduction: What was trained on what, as a sentence.
        story: The network's mistakes, and what becomes of them; None where no method could be fitted.
        text: The story for a terminal.
        comparison: The rows, and what failed.
        report: The HTML file; None if it could not be written.
        seconds: Wall time.
    """

    introduction: str
    story: Story | None
    text: str
    comparison: Comparison
    report: Path | None
    seconds: float

    def __str__(self) -> str:
        """Return the story, the table and where the report is."""
        where = f"The report is in {self.report}." if self.report else "There is no report."
        table = f"The comparison (all but '{PLAIN}' are calibrated on validation digits)\n\n{self.comparison}"
        parts = [self.introduction, self.text, table, f"{where} It took {self.seconds:.0f} s."]
        return "\n\n".join(part for part in parts if part)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors as plain values."""
        return {
            "introduction": self.introduction,
            "story": None if self.story is None else self.story.to_dict(),
            **self.comparison.to_dict(),
            "report": None if self.report is None else str(self.report),
            "seconds": self.seconds,
        }


def run_demo(out: Path, *, seed: int = 0, everything: bool = False, quick: bool = False, progress: bool = True) -> Demo:
    """Train a network on a few digits, show its worst mistakes and what bayesify makes of them, and write a report.

    The network stands for one that you have trained. It learns from only 100 of the 1078 digits there are for
    training, without weight decay and until its training loss is near zero: like most networks that are trained to the
    end it is surer than it should be, and with all the digits there would be little left to improve. The
    other digits of the training part join the validation part, up to 600, and the test part. Every method starts from
    this network with its own `example()` settings and sees the same 100 digits. What is chosen, calibrated or promised
    is so on the validation part: the posterior of the story is the one with the least NLL there; the test part and the
    OOD images are only measured on.

    Args:
        out: Folder of the report.
        seed: Of the choice of digits, the training and the draws.
        everything: Compare every registered method instead of five.
        quick: Train for a moment only, to check that everything runs; the figures then say nothing.
        progress: Whether to show a line that says what is being done.

    Returns:
        The story, the table's rows, what failed, and where the report is.
    """
    known = list_methods()
    names = [name for name in (known if everything else FIVE) if name in known and known[name] is not MAP]
    methods = {name: known[name] for name in names}
    # The network, its temperature, choose, the story's last two chapters and the report.
    with (
        _one_thread(),
        tqdm(total=len(methods) + 7, file=sys.stderr, disable=not progress, leave=False, bar_format=BAR) as bar,
    ):
        return _run(out, methods, seed, quick, _Line(bar))


BAR = "[{n_fmt}/{total_fmt}] {desc}  {elapsed}"


class _Line:
    """The line that says what is being done."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self.bar = bar

    def next(self, text: str) -> None:
        """Begin the next step."""
        self.bar.update()
        self.say(text)

    def say(self, text: str) -> None:
        """Say what the step is at."""
        self.bar.set_description_str(text)


def _run(out: Path, methods: dict[str, type[Method]], seed: int, quick: bool, line: _Line) -> Demo:
    start = time.perf_counter()
    data = read_data(seed=seed, num_train=NUM_TRAIN, num_val=NUM_VAL, num_other=100 if quick else None)
    line.next(f"training a network on {len(data.train)} digits")
    network, history, seconds = train_network(data.train, seed=seed, quick=quick)
    task = Task(
        network=network,
        train=_loader(data.train, shuffle=True),
        val=_loader(data.val),
        test=_loader(data.test),
        ood={name: _loader(Split(x, torch.zeros(len(x)).long())) for name, x in data.ood.items()},
        plain_seconds=seconds,
        seed=seed,
    )
    posteriors: dict[str, Posterior] = {}
    comparison = compare(task, _makers(task, methods, posteriors, quick=quick, line=line), each=line.next)
    story, words = None, ""
    fitted = {name: posteriors[name] for name in methods if name in posteriors and name not in comparison.failures}
    if fitted and {PLAIN, TEMPERED}.isdisjoint(comparison.failures):
        story = _story(task, posteriors, fitted, comparison, line)
        words = _telling.text(story, data.test.inputs)
    line.next("drawing the report")
    introduction = _introduction(network, data, history, seconds)
    comparison, report = comparison.with_report(
        out / "report.html",
        title="What does a network know of what it does not know?",
        images=data.test.inputs,
        class_names=[str(digit) for digit in range(10)],
        ood_images=data.ood,
        introduction=introduction,
        **({} if story is None else _opening(story)),
    )
    return Demo(introduction, story, words, comparison, report, time.perf_counter() - start)


def _makers(
    task: Task, methods: dict[str, type[Method]], posteriors: dict[str, Posterior], *, quick: bool, line: _Line
) -> dict[str, Callable[[], Made]]:
    """Return how each row is made: the network, what needs no training, and every method, calibrated and kept."""
    assert task.val is not None
    val = task.val

    def kept(name: str, make: Callable[[], Made]) -> Callable[[], Made]:
        def made() -> Made:
            posterior, seconds = make()
            posteriors[name] = posterior
            line.say(f"{name}: predicting {len(task.test.dataset):,} digits and the OOD images")  # type: ignore[arg-type]
            return posterior, seconds

        return made

    def tempered(method: Method) -> Made:
        line.say("fitting a temperature" if isinstance(method, MAP) else f"{method.name}: fitting it")
        posterior, seconds = fit_method(task, method)
        task.calibrate(posterior, val)
        return posterior, seconds

    def chosen() -> Made:
        line.say("choose: trying what two passes allow")
        return choose(task.network, val, passes=2, seed=task.seed, verbose=False), 0.0

    makers: dict[str, Callable[[], Made]] = {
        PLAIN: lambda: (convert(task.network, MAP()), 0.0),
        TEMPERED: lambda: tempered(MAP()),
        CHOSEN: chosen,
    }
    for name, cls in methods.items():
        method = cls.example()
        if quick:
            method = dataclasses.replace(method, epochs=min(1, method.epochs))
        makers[name] = lambda method=method: tempered(method)  # type: ignore[misc]
    return {name: kept(name, make) for name, make in makers.items()}


def _story(
    task: Task, posteriors: dict[str, Posterior], fitted: dict[str, Posterior], comparison: Comparison, line: _Line
) -> Story:
    ours = best_of(task, fitted)
    line.next("deciding who answers: guards on the validation digits")
    plain = next(one for one in comparison.evaluations if one.name == PLAIN)
    choice = posteriors[CHOSEN].choice if CHOSEN not in comparison.failures else None
    guarded = [TEMPERED, *([CHOSEN] if choice is not None and choice.chosen != choice.candidates[0].name else []), ours]
    decided, refusal = decide_all(task, {name: posteriors[name] for name in guarded}, plain)
    line.next("predicting in one pass what took twenty draws")
    pairs = in_one_pass(task, fitted, comparison.evaluations)
    return tell(
        comparison.evaluations,
        ours=ours,
        plain=PLAIN,
        tempered=TEMPERED,
        chosen=CHOSEN,
        choice=choice,
        decided=decided,
        refusal=refusal,
        pairs=pairs,
    )


def _opening(story: Story) -> dict[str, Any]:
    """Return what the report opens with."""
    verdicts = None
    if story.decided:
        verdicts = [_telling.DONE[VERDICTS[code]] for code in story.decided[-1].codes.tolist()]
    from bayesify.cli import _picturing

    return {"shown": story.ours, "verdicts": verdicts, "opening": _picturing.sections(story)}


def read_data(*, seed: int, num_train: int, num_val: int, num_other: int | None = None) -> DemoData:
    """Read the digits and cut the OOD images.

    Args:
        seed: Decides which digits of the training part are learned from.
        num_train: How many are.
        num_val: How many to choose and calibrate on: the validation part, and others of the training part.
        num_other: At most so many in each part but the first; None takes all.
    """
    whole, val, test = (read_digits(split) for split in ("train", "val", "test"))
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    more = num_train + max(0, num_val - len(val))
    some = slice(num_other)
    photos = photo_patches(min(NUM_OOD, num_other or NUM_OOD), seed=seed)
    return DemoData(
        train=whole.part(order[:num_train]),
        val=_joined(val.part(slice(num_val)), whole.part(order[num_train:more])).part(some),
        test=_joined(test, whole.part(order[more:])).part(some),
        ood={"photos": photos, "noise": uniform_like(photos, generator=seed)},
    )


def _joined(one: Split, other: Split) -> Split:
    return Split(torch.cat([one.inputs, other.inputs]), torch.cat([one.targets, other.targets]))


def make_network() -> nn.Module:
    """Make a small convolutional network with batch normalisation, for images (B, 1, 8, 8).

    >>> make_network()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    features = [*block(1, 32, 1), *block(32, 64, 2), *block(64, 64, 2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(4 * 64, 10))


def train_network(train: Split, *, seed: int, quick: bool) -> tuple[nn.Module, History, float]:
    """Train the network that stands for the user's, with the library's own loop.

    Returns:
        The network, the history of its training, and the seconds that it took.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make_network()
    loader, epochs = _loader(train, shuffle=True), 2 if quick else None
    # What torch loads at the first step of all should not count as training.
    fit(convert(network, TRAINING), [next(iter(loader))], epochs=1, num_data=len(train), progress=False)
    posterior = convert(network, TRAINING)
    start = time.perf_counter()
    history = fit(posterior, loader, epochs=epochs, seed=seed, progress=False)
    return posterior.network.eval(), history, time.perf_counter() - start


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: sums have one order then, and so small a network waits more for a second than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _loader(split: Split, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(split, batch_size=16 if shuffle else 256, shuffle=shuffle)


def _introduction(network: nn.Module, data: DemoData, history: History, seconds: float) -> str:
    weights, loss = sum(p.numel() for p in network.parameters()), history.epochs[-1].terms["total"]
    ood = " and ".join(f"{len(images)} of {name}" for name, images in data.ood.items())
    return (
        f"This network stands for one of yours: {weights:,} weights, trained on {len(data.train)} digits in "
        f"{seconds:.1f} s, to a loss of {loss:.4f}. {len(data.val):,} other digits are there to choose, calibrate and "
        f"promise by; the figures are of {len(data.test):,} more, and of images that are no digits: {ood}."
    )
