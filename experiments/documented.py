"""The tables of the documentation by the names of their markers: which rows and measures each shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from experiments.benchmark_tables import BENCHMARKS
from experiments.board_tables import BOARDS
from experiments.lora_tables import ADAPTERS
from experiments.operations import OPERATIONS
from experiments.scale_tables import SCALE
from experiments.tables import Cell, Line, markdown, rows_of, shown, table
from experiments.task_tables import TASKS
from experiments.verdict_tables import VERDICTS

__all__ = ["TABLES"]

NOTHING = "\N{EN DASH}"  # of a plain network, which has no epistemic part
ACCURACY = Cell(("part", "accuracy"), 100, 2)
NLL = Cell(("part", "nll"))
ECE = Cell(("part", "ece"), 100, 2)
AURC = Cell(("part", "aurc"), 1000, 2)
QUALITY = {"accuracy %": ACCURACY, "NLL": NLL, "ECE %": ECE, "AURC 1e-3": AURC}


def told(measure: str, kind: str, *, spread: bool = True) -> Cell:
    """Return how well a set is told from the own inputs: "auroc-total" of "notmnist"."""
    return Cell(("part", f"{measure}/{kind}"), digits=3, spread=spread)


def both(*lines: Line, words: str = " + temperature") -> list[Line]:
    """Return each line before and after temperature scaling."""
    made = []
    for line in lines:
        row = line.label if line.row is None else line.row
        made += [line, Line(line.label + words, row, f"{line.part}, calibrated", line.file, line.inside, line.hidden)]
    return made


# -- ABNN -------------------------------------------------------------------------------------------------------------

OOD = {
    "AUROC Fashion-MNIST": told("auroc-total", "fashion-mnist"),
    "FPR95 Fashion-MNIST": told("fpr95-total", "fashion-mnist"),
    "AUROC notMNIST": told("auroc-total", "notmnist"),
    "AUPR notMNIST": told("aupr-total", "notmnist"),
    "FPR95 notMNIST": told("fpr95-total", "notmnist"),
}
ABNN_LINES = ("map", "mc-dropout, last layer", "abnn", "deep ensemble of perturbed copies", "mc-dropout, convolutions")
TUNING = {
    "accuracy %": Cell(("validation", "accuracy"), 100, 2),
    "NLL": Cell(("validation", "nll")),
    "NLL + temperature": Cell(("validation, calibrated", "nll")),
}
TUNED = (
    "alpha=0.05", "alpha=0.05, noise=channel", "alpha=0.1", "alpha=0.02", "alpha=0.05, lr=0.02", "alpha=0.05, epochs=0",
    "alpha=0.05, schedule=cosine", "alpha=0.05, lr=0.001",
)  # fmt: skip
ABLATED = (
    "the default", "noise per element", "noise per channel", "eta=0", "not fitted", "the last stage", "the first layer",
    "second norm of each block", "statistics updated", "all parameters trained", "grey border",
)  # fmt: skip
ABLATION_COLUMNS = {
    "accuracy %": Cell(("test", "accuracy"), 100, 2),
    "NLL": Cell(("test", "nll")),
    "NLL + temperature": Cell(("test, calibrated", "nll")),
    "AURC 1e-3": Cell(("test, calibrated", "aurc"), 1000, 2),
    "AUROC Fashion-MNIST": Cell(("test, calibrated", "auroc-total/fashion-mnist"), digits=3),
    "AUROC notMNIST": Cell(("test, calibrated", "auroc-total/notmnist"), digits=3),
}
SEGMENTATION = {
    "mIoU %": Cell(("part", "miou"), 100, 1),
    "NLL": NLL,
    "ECE %": ECE,
    "AUROC notMNIST": told("auroc-total", "notmnist"),
    "AUPR notMNIST": told("aupr-total", "notmnist"),
    "FPR95 notMNIST": told("fpr95-total", "notmnist"),
    "AUROC by epistemic notMNIST": told("auroc-epistemic", "notmnist"),
}
OUT_OF_SCOPE = {
    "AUROC out of scope": told("auroc-total", "out of scope"),
    "AUROC by epistemic out of scope": told("auroc-epistemic", "out of scope"),
}
ABNN_QUERIES = ("map", "abnn", "abnn, not fitted", "abnn, last layer", "mc-dropout")


def names(*labels: str) -> list[Line]:
    """Return lines that are called as their rows."""
    return [Line(label) for label in labels]


# -- BayesAdapter -----------------------------------------------------------------------------------------------------


def quality(part: str, words: str = "") -> list[tuple[str, Cell]]:
    """Return the columns of one part; the ECE is without its spread."""
    return [
        (f"{words}accuracy %", Cell((part, "accuracy"), 100, 2)),
        ("NLL", Cell((part, "nll"))),
        ("ECE %", Cell((part, "ece"), 100, 2, spread=False)),
        ("AURC 1e-3", Cell((part, "aurc"), 1000, 2)),
    ]


BEFORE_AND_AFTER = [*quality("test"), *quality("test, calibrated", "+ temperature: ")]
WITH_AURC = {**TUNING, "AURC 1e-3 + temperature": Cell(("validation, calibrated", "aurc"), 1000, 2)}


def rate(lr: float, schedule: str, std: float) -> str:
    """Return the name of a row of BayesAdapter's settings."""
    return f"epochs=2, sgd, lr={lr:g}, {schedule}, start_std={std:g}, log_std_lr=0.1"


ADAPTER_TUNED = (
    Line("rate .0001, start_std .0125", rate(1e-4, "constant", 0.0125)),
    Line("rate .0001, start_std .01", rate(1e-4, "constant", 0.01)),
    Line("rate .0008, start_std .01", rate(8e-4, "constant", 0.01)),
    Line("rate .004, cosine, start_std .01", rate(4e-3, "cosine", 0.01)),
    Line("rate .004, cosine, start_std .02", rate(4e-3, "cosine", 0.02)),
)
ADAPTER_MAIN = (
    Line("plain", "map"),
    Line("rate .0001, start_std .0125", "bayes-adapter"),
    Line("rate .0008, start_std .01", "bayes-adapter, --lr 0.0008 --start-std 0.01"),
    Line("supervised", "bayes-adapter, supervised"),
    Line("SWAG", "swag", file="baselines"),
    Line("dropout before the last layer", "mc-dropout, last layer, not fitted", file="baselines"),
)
ADAPTER_QUERIES = {
    **dict(quality("part")),
    "out of scope: AUROC": told("auroc-total", "out of scope"),
    "FPR95": told("fpr95-total", "out of scope", spread=False),
}
WARM = "bayes-adapter, log_std_lr=0.02"
ADAPTER_QUERY_LINES = (
    *both(Line("plain", "map")),
    Line("plain, trained for two epochs more", "map, trained on"),
    Line("the same + temperature", "map, trained on", "test, calibrated"),
    Line("bayes-adapter, three seeds", "bayes-adapter"),
    Line("bayes-adapter + temperature", "bayes-adapter", "test, calibrated"),
    Line("ψ's rate .02, one seed", WARM),
    Line("the same + temperature", WARM, "test, calibrated"),
    Line("ψ's rate .02, supervised by 100 out-of-scope queries", "bayes-adapter, supervised, log_std_lr=0.02"),
    Line("the same + temperature", "bayes-adapter, supervised, log_std_lr=0.02", "test, calibrated"),
)
REGRESSION = [(name, Cell((name, weight))) for weight in range(3) for name in ("mean", "std")]
REGRESSION_LINES = [
    Line("exact mean-field answer", "exact"),
    *(Line(f'`"{noise}"`', noise) for noise in ("local", "exemplar", "flipout", "shared")),
]
KINDS = {
    "PGD: 20 steps of .003 within .031, against 20 draws": "pgd",
    "the same by an attacker who also lowers the mutual information": "pgd that knows the detector",
    "noise in the ball (trained on)": "trained on: noise in the ball",
    "patches of 8 shuffled (trained on)": "trained on: patches of 8 shuffled",
    "two images mixed (trained on)": "trained on: mixed",
    "patches of 4 shuffled": "not seen: patches of 4 shuffled",
    "salt and pepper": "not seen: salt and pepper",
    "random phases": "not seen: random phases",
    "Fashion-MNIST": "not seen: fashion-mnist",
    "notMNIST": "not seen: notmnist",
}


def attacks() -> str:
    """Return the average precisions of both fits, a line for each kind of OOD image."""
    fits = [rows_of("adapter_cifar_attacks_resnet20", f"bayes-adapter{end}") for end in ("", ", supervised")]
    lines = [["", "not supervised", "supervised"]]
    lines.append(["accuracy on these images", *(Cell(("accuracy",), 100, 1).of(rows) + " %" for rows in fits)])
    for label, kind in KINDS.items():
        lines.append([label, *(Cell((kind, "average precision"), digits=3).of(rows) for rows in fits)])
    return markdown(lines)


# -- iBNN -------------------------------------------------------------------------------------------------------------

IBNN_TUNED = (
    Line("not fitted"),
    Line("fitted: weights at 1e-4, `latent_lr` .0125 K, `means_std` .05", "fitted"),
    Line("`means_std` .1", "means_std=0.1"),
    Line("`start_std` .02", "start_std=0.02"),
    Line("`latent_lr` .001 K", "latent_lr=0.001"),
    Line("weights at 1e-3", "slow_lr=0.001"),
    Line("weights frozen", "frozen"),
    Line('`kl="average"`', "kl=average"),
)
IBNN_MAIN = (
    Line("plain", "map"),
    Line("MC dropout before convolutions", "mc-dropout"),
    Line("K = 4, `means_std` .05", "ibnn-4"),
    Line("K = 8", "ibnn-8"),
    Line("K = 16", "ibnn-16"),
    Line("K = 16, not fitted", "ibnn-16, not fitted"),
    *(
        Line(f"K = {k}, {'`means_std` ' if k == 4 else ''}.{std}", f"ibnn-{k}, means_std=0.{std}")
        for std in (1, 3)
        for k in (4, 8, 16)
    ),
)
IBNN_QUERIES = [
    *quality("test"),
    ("NLL + temperature", Cell(("test, calibrated", "nll"))),
    ("AUROC: total", told("auroc-total", "out of scope")),
    ("epistemic", told("auroc-epistemic", "out of scope")),
]
IBNN_QUERY_LINES = (
    Line("plain", "map", hidden={"epistemic": NOTHING}),
    Line("iBNN", "ibnn-4"),
    Line("iBNN, weights frozen", "ibnn-4, weights frozen"),
)
LENETS = {
    "plain, rate .02": "plain",
    "iBNN, K = 8": "iBNN",
    "mean-field VI, rate .02": "mean-field VI",
    "plain, rate .1": "plain, rate .1",
}


def lenets() -> str:
    """Return test error and NLL by size."""
    error, nll = Cell(("test", "accuracy"), -100, 1, offset=100), Cell(("test", "nll"), digits=3)
    lines = [["", "42 K", "165 K", "657 K", "2.6 M"]]
    for label, name in LENETS.items():
        cells = []
        for times in (1, 4, 16, 64):
            if name == "plain, rate .1" and times > 4:  # which have not been run
                cells.append("")
                continue
            rows = rows_of("ibnn_fashion_sizes", f"{name}, {times}x parameters")
            cells.append(f"{error.of(rows)} / {nll.of(rows)}")
        lines.append([label, *cells])
    return markdown(lines)


# -- Laplace and predictions without draws ----------------------------------------------------------------------------

LAPLACE = {
    **QUALITY,
    "AUROC Fashion-MNIST": told("auroc-total", "fashion-mnist"),
    "AUROC notMNIST": told("auroc-total", "notmnist"),
    "AUROC notMNIST, epistemic": told("auroc-epistemic", "notmnist"),
    "NLL + temperature": Cell(("test, calibrated", "nll")),
}
LAPLACE_LINES = (
    *(
        Line(name)
        for name in (
            "map",
            "last layer, prior by evidence, probit",
            "last layer, prior by evidence, 200 draws of logits",
            "last layer, prior by validation, probit",
            "last layer, prior by validation, 200 draws of logits",
        )
    ),
    Line("all weights, diagonal, prior by validation, 5 draws", "diagonal, prior by validation"),
    Line("all weights, Kronecker, prior by validation, 5 draws", "kronecker, prior by validation"),
)
WAYS = {
    ", its mean": "mean", ", 4 draws": "4 draws", ", 100 draws": "100 draws", ', `"streamlined"`': "streamlined",
    ', `"linearised"`': "linearised",
}  # fmt: skip
UCI = {
    "Boston": "bostonHousing", "energy": "energy", "wine": "wine-quality-red", "yacht": "yacht",
    "power plant": "power-plant",
}  # fmt: skip


def uci() -> str:
    """Return the NLL of every table, and the RMSE of two."""
    lines = [["", *UCI, "RMSE Boston", "yacht"]]
    for posterior, row in (("Laplace", "laplace"), ("BayesAdapter", "adapter")):
        for words, way in WAYS.items():
            named = "Laplace (diagonal)" if (row, way) == ("laplace", "mean") else posterior
            nll, rmse = (Cell((way, "test", measure), digits=2, spread=False) for measure in ("nll", "rmse"))
            cells = [nll.of(rows_of("streamlined_uci", f"{name}, {row}")) for name in UCI.values()]
            cells += [rmse.of(rows_of("streamlined_uci", f"{name}, {row}")) for name in ("bostonHousing", "yacht")]
            lines.append([named + words, *cells])
    return markdown(lines)


FASHION_LINES = (
    Line("plain", inside=("mean",)),
    Line("Laplace (diagonal), 4 draws", "laplace", inside=("4 draws",)),
    Line("Laplace, 100 draws", "laplace", inside=("100 draws",)),
    Line('Laplace, `"streamlined"`', "laplace", inside=("streamlined",)),
    Line('Laplace, `"streamlined"` + scale', "laplace", "test, scaled", inside=("streamlined",)),
    Line('Laplace, `"linearised"` + scale', "laplace", "test, scaled", inside=("linearised",)),
    Line("BayesAdapter, its mean", "adapter", inside=("mean",)),
    Line("BayesAdapter, 4 draws", "adapter", inside=("4 draws",)),
    Line("BayesAdapter, 100 draws", "adapter", inside=("100 draws",)),
    Line('BayesAdapter, `"streamlined"` + scale', "adapter", "test, scaled", inside=("streamlined",)),
)
COSTS = [("cost", Cell(("part", "cost in plain passes"), digits=1)), ("accuracy %", Cell(("part", "accuracy"), 100, 1))]
CIFAR_LINES = (
    Line("BayesAdapter, its mean", "adapter", inside=("mean",), hidden={"cost": ""}),
    Line("BayesAdapter, 4 draws", "adapter", inside=("four draws",)),
    Line("BayesAdapter, 20 draws", "adapter", inside=("twenty draws",)),
    Line('BayesAdapter, `"streamlined"`', "adapter", inside=("streamlined",)),
    Line('BayesAdapter, `"streamlined"` + scale', "adapter", "test, scaled", inside=("streamlined",)),
    Line("ABNN, its three members without noise", "abnn", inside=("mean of three members",), hidden={"cost": ""}),
    Line("ABNN, nine draws", "abnn", inside=("nine draws",)),
    Line('ABNN, `"streamlined"`', "abnn", inside=("streamlined",)),
    Line('ABNN, `"streamlined"` + scale', "abnn", "test, scaled", inside=("streamlined",)),
)

# -- SGLD and distillation --------------------------------------------------------------------------------------------

SETS = {
    "notMNIST": "notMNIST", "Omniglot": "Omniglot", "grey CIFAR-10": "CIFAR-10, grey", "Gaussian": "Gaussian",
    "uniform": "uniform",
}  # fmt: skip
DISTILLED = {
    "SGD": "SGD", "MC dropout": "MC dropout", "SGLD": "SGLD", "APD": "APD", "APD, hidden 20": "APD, hidden 20",
    "APD, hidden 20, residual noise": "APD, hidden 20, and residual noise",
    "APD, all coordinates, rate 1e-4": "APD, all coordinates, the paper's rate",
    "PCA, rank 32, residual noise": "PCA and residual noise", "mixture of 60 Gaussians": "mixture of 60",
    "SWAG of the bank": "SWAG of the bank",
}  # fmt: skip
LARGER = ("SGD", "MC dropout", "SGLD", "APD", "APD, all coordinates, rate 1e-4", "APD, hidden 20")


def per_cent(value: float) -> str:
    """Return a share that is in per cent already.

    >>> per_cent(99.04), per_cent(100.0)
    ('99.0', '100')
    """
    return shown(value, 1).replace("100.0", "100")


def distilled(network: str, labels: Sequence[str]) -> str:
    """Return what each posterior costs, its accuracy, and AUROC by entropy and by BALD, inputs multiplied by five."""
    lines = [["", "networks stored", "accuracy %", *SETS]]
    for label in labels:
        (row,) = rows_of(f"apd_mnist_tables_{network}", DISTILLED[label])
        cells = [f"{max(1, round(row['networks'])):,}", shown(100 * row["accuracy"], 2)]
        for name in SETS.values():
            entropy, bald = (row["times 5"][name][score][0] for score in ("entropy", "BALD"))
            cells.append(f"{per_cent(entropy)} / {NOTHING if label == 'SGD' else per_cent(bald)}")
        lines.append([label, *cells])
    return markdown(lines)


def sources() -> str:
    """Return AUROC by BALD of posteriors and of their distillations, and the divergence between them."""
    lines = [["source", "itself", "generator", "KL", "PCA, residual noise", "KL", "mixture of 10", "KL"]]
    for label, name in (("ABNN", "ABNN"), ("SWAG", "SWAG"), ("deep ensemble of 20", "deep ensemble")):
        cells = [label]
        for way in ("source", "wgan-gp", "pca", "mixture"):
            (row,) = rows_of("apd_sources", f"{name}, {way}")
            cells.append(" / ".join(shown(row["AUROC by BALD"][kind], 0) for kind in ("photos", "notMNIST", "uniform")))
            if way != "source":
                divergence = row["KL from the source"]
                cells.append(shown(divergence, 4 if divergence < 0.01 else 3))
        lines.append(cells)
    return markdown(lines)


def adversarial() -> str:
    """Return the AUROC of each detector by model variance, grey boxes with the paper's, then white boxes."""
    from experiments.apd_adversarial import NAMES, PAPER

    by = [f"by {name}" for name in NAMES]
    lines = [["source", "attack", *by, f"white box: {by[0]}", *by[1:]]]
    for source in NAMES:
        boxes = [rows_of("apd_adversarial", f"{source}, {box}")[0] for box in ("grey", "white")]
        for attack in ("FGSM", "PGD"):
            grey, white = ([box[attack][name]["model variance"] for name in NAMES] for box in boxes)
            paper = PAPER[f"{source}, {attack}"]
            cells = [f"{shown(ours, 1)} ({shown(theirs, 1)})" for ours, theirs in zip(grey, paper, strict=True)]
            lines.append([source, attack, *cells, *(shown(value, 1) for value in white)])
    return markdown(lines)


ACTIVE = (
    ("SGLD, temperature 1, prior_std .2", "random", "SGLD, random"),
    ("the same", "BALD", "SGLD, bald"),
    ("SGLD, temperature 1/1000, as the paper's code", "random", "SGLD at temperature 1/1000, random"),
    ("the same", "BALD", "SGLD at temperature 1/1000, bald"),
    ("the same", "entropy, the paper's", "SGLD at temperature 1/1000, entropy"),
    ("plain network", "random", "plain network, random"),
    ("the same", "entropy", "plain network, entropy"),
)


def active() -> str:
    """Return the test accuracy and NLL at the last number of labels."""
    lines = [["learned by", "chosen by", "accuracy %", "NLL"]]
    for learner, choice, name in ACTIVE:
        rows = rows_of("apd_active", name)
        accuracy, nll = Cell(("accuracy", -1), 100, 1), Cell(("nll", -1), digits=2, spread=False)
        lines.append([learner, choice, accuracy.of(rows), nll.of(rows)])
    return markdown(lines)


GAL = {"random": ("random", (255, 835)), "BALD": ("BALD", (145, 335))}  # of the paper, for errors of 10 and 5 %


def labels_needed() -> str:
    """Return how many labels a convolutional network with MC dropout needs, seed by seed, beside the paper's."""
    from experiments.active_mnist import needed

    lines = [["chosen by", "90 %", "the paper", "95 %", "the paper"]]
    for label, (name, paper) in GAL.items():
        cells = []
        for level, theirs in zip((0.9, 0.95), paper, strict=True):
            found = [needed(curve, level) for curve in rows_of("active_mnist", name)]
            cells += [", ".join("not reached" if one is None else f"{one:.0f}" for one in found), str(theirs)]
        lines.append([label, *cells])
    return markdown(lines)


PAIRS = {
    "pairs decided rightly, %": Cell(("accuracy",), 100, 1),
    "one character, found so, %": Cell(("same, untouched",), 100, 1),
    "the same, attacked": Cell(("same, attacked",), 100, 1),
    "attacks noticed, average precision": Cell(("average precision",), digits=3),
    "by total entropy": Cell(("by total entropy",), digits=3),
}
PAIRS_LINES = (
    Line("plain"), Line("BayesAdapter", "bayes-adapter"), Line("BayesAdapter, supervised", "bayes-adapter, supervised")
)  # fmt: skip


# What the row is called, the length of the run in relaxation times, which follows from its settings, and the row.
STUDY = (
    ("80,000 steps, lr .2, half of them burn-in", "4", "as in the tables"),
    ("its last fifth of samples", ".8", "samples of the last tenth"),
    ("a tenth of the steps", ".4", "a tenth of the steps"),
    ("lr .05, the paper's", "1", "the paper's rate"),
    ("lr .05, 500 steps of burn-in, the paper's", "2", "the paper's rate and burn-in, 500 steps"),
    ("prior variance times 10", ".4", "a prior ten times as wide in variance"),
    ("prior variance times .1", "40", "a prior a tenth as wide in variance"),
    ("four chains, a quarter of the steps each", "4 x 1", "four chains, a quarter of the steps each"),
    ("from the trained network, not from new weights", "4", "from the trained network"),
)


CHAINS = {"validation accuracy %": Cell(("accuracy",), 100, 2), "NLL": Cell(("nll",))}
CHAINS_LINES = [
    f"{number} from {start}"
    for start in ("the trained network", "new weights")
    for number in ("one chain", "four chains")
]


def study() -> str:
    """Return what decides the AUROC of SGLD, the best of each column in bold."""
    titles = ("notMNIST: entropy", "BALD", "Omniglot: BALD", "CIFAR-10: BALD", "ess", "R-hat")
    places = (("notMNIST", "entropy"), ("notMNIST", "BALD"), ("Omniglot", "BALD"), ("CIFAR-10, grey", "BALD"))
    found: list[dict[str, Any]] = [rows_of("apd_mnist_study_fcNN1", row)[0] for _, _, row in STUDY]
    best = [max(row[kind][score][0] for row in found) for kind, score in places]
    lines = [["", "length", *titles]]
    for (label, length, _), row in zip(STUDY, found, strict=True):
        values = [row[kind][score][0] for kind, score in places]
        cells = [
            f"**{shown(value, 1)}**" if value == top else shown(value, 1)
            for value, top in zip(values, best, strict=True)
        ]
        ess = row["diagnosis"]["ess"]
        cells += [shown(ess, 0 if ess >= 50 else 1), shown(row["diagnosis"]["r_hat"], 2)]
        lines.append([label, length, *cells])
    return markdown(lines)


# -- the decomposition ------------------------------------------------------------------------------------------------

METHODS = {
    "plain network (MAP)": "map", "MC dropout": "mc-dropout", "deep ensemble of 10": "deep-ensemble", "SWAG": "swag",
    "ABNN": "abnn", "BayesAdapter": "bayes-adapter", "iBNN": "ibnn", "Laplace, last layer": "laplace, last layer",
    "Laplace, diagonal": "laplace, diagonal", "Laplace, Kronecker": "laplace, kronecker", "SGLD": "sgld", "APD": "apd",
}  # fmt: skip


def decomposition(part: str) -> str:
    """Return aleatoric and epistemic uncertainty by the number of training examples, and the last NLL."""
    sizes = (128, 1024, 8192)
    lines = [["", "n = 128", "1,024", "8,192", "NLL"]]
    for label, name in METHODS.items():
        rows = [rows_of(f"truth_{part}", f"{name}, {n}")[0] for n in sizes]
        cells = [f"{shown(row['aleatoric'], 3)} / {shown(row['epistemic'], 4)}" for row in rows]
        lines.append([label, *cells, shown(rows[-1]["nll"], 3)])
    return markdown(lines)


HMC = [
    (f"agreement {place}" if kind == "agreement" else kind, Cell((f"{kind} {place}",), digits=3))
    for place in ("inside", "outside")
    for kind in ("agreement", "total variation", "epistemic")
]
HMC_LINES = [Line("HMC, half of the chains", "hmc, half of the chains"), *(Line(*both) for both in METHODS.items())]

TABLES: dict[str, Callable[[], str]] = {
    "abnn-resnet20": partial(table, "abnn_cifar_main_resnet20", {**QUALITY, **OOD}, both(*names(*ABNN_LINES))),
    "abnn-resnet44": partial(table, "abnn_cifar_main_resnet44", {**QUALITY, **OOD}, both(*names("map", "abnn"))),
    "abnn-tuning": partial(table, "abnn_cifar_tuning_resnet20", TUNING, names(*TUNED)),
    "abnn-ablations": partial(table, "abnn_cifar_ablations_resnet20", ABLATION_COLUMNS, names(*ABLATED)),
    "abnn-queries": partial(table, "abnn_clinc_main", {**QUALITY, **OUT_OF_SCOPE}, both(*names(*ABNN_QUERIES))),
    "abnn-segmentation": partial(table, "abnn_segmentation", SEGMENTATION, both(*names("map", "abnn"))),
    "adapter-tuning": partial(table, "adapter_cifar_tuning_resnet20", WITH_AURC, ADAPTER_TUNED),
    "adapter-resnet20": partial(table, "adapter_cifar_main_resnet20", BEFORE_AND_AFTER, ADAPTER_MAIN),
    "adapter-resnet44": partial(table, "adapter_cifar_main_resnet44", BEFORE_AND_AFTER, ADAPTER_MAIN[:2]),
    "adapter-regression": partial(table, "adapter_regression", REGRESSION, REGRESSION_LINES),
    "adapter-attacks": attacks,
    "adapter-queries": partial(table, "adapter_clinc_main", ADAPTER_QUERIES, ADAPTER_QUERY_LINES),
    "ibnn-sizes": lenets,
    "ibnn-tuning": partial(table, "ibnn_cifar_tuning_resnet20", WITH_AURC, IBNN_TUNED),
    "ibnn-resnet20": partial(table, "ibnn_cifar_main_resnet20", BEFORE_AND_AFTER, IBNN_MAIN),
    "ibnn-queries": partial(table, "ibnn_clinc_main", IBNN_QUERIES, IBNN_QUERY_LINES),
    "laplace-resnet20": partial(table, "laplace_cifar", LAPLACE, LAPLACE_LINES),
    "streamlined-uci": uci,
    "streamlined-fashion": partial(table, "streamlined_fashion", quality("part"), FASHION_LINES),
    "streamlined-resnet20": partial(table, "streamlined_cifar", [*COSTS, *quality("part")[1:]], CIFAR_LINES),
    "distilled-fcnn1": partial(distilled, "fcNN1", list(DISTILLED)),
    "distilled-fcnn2": partial(distilled, "fcNN2", LARGER),
    "distilled-sources": sources,
    "distilled-attacks": adversarial,
    "active-learning": active,
    "active-gal": labels_needed,
    "omniglot-pairs": partial(table, "omniglot_pairs", PAIRS, PAIRS_LINES),
    "sgld-study": study,
    "sgld-chains": partial(table, "sgld_chains", CHAINS, names(*CHAINS_LINES)),
    "truth-classes": partial(decomposition, "classes"),
    "truth-numbers": partial(decomposition, "numbers"),
    "truth-hmc": partial(table, "truth_hmc", HMC, HMC_LINES),
    **BENCHMARKS,
    **BOARDS,
    **OPERATIONS,
    **TASKS,
    **VERDICTS,
    **SCALE,
    **ADAPTERS,
}
