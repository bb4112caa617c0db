"""The scoreboard: what each way to be Bayesian after training is worth, against what it costs to predict.

Rows that draw do so four times, the budget of passes that `choose` has too. Nothing is trained after the plain network:
noise is as it comes, or as wide as the validation data let it be; Laplace has its curvature from a pass over some
training data. Priors, temperatures, scales and poolings are found on validation data. About two minutes of one core for
a row of ResNet-20.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import bayesify
from bayesify import ABNN, IBNN, MAP, BayesAdapter, Laplace, MCDropout
from experiments.board import Board, Way
from experiments.board_tasks import CifarBoard, FashionBoard, ScenesBoard, Shown, UciBoard
from experiments.clinc import Clinc
from experiments.config import Config, Task
from experiments.configs.adapter import around

__all__ = ["DRAWS", "EXPERIMENTS"]

DRAWS = 4
MIRROR = ("identity", "mirror")
THREE, FIVE = (0, 1, 2), (0, 1, 2, 3, 4)
TABLES = ("bostonHousing", "energy", "wine-quality-red", "yacht", "power-plant")
ADAPTER = BayesAdapter(epochs=0, start_std=around(0.0125))
FACTORS = IBNN(epochs=0, components=2, draws_per_component=2, means_std=0.05)
NORMS = ABNN(epochs=0, members=1)  # members differ once they are fitted
LAYERS = {
    "Laplace, last layer": Laplace(prior_precision="validation"),
    "Laplace, diagonal": Laplace(structure="diagonal", mc_labels=1, prior_precision="validation"),
    "Laplace, Kronecker": Laplace(structure="kronecker", mc_labels=1, prior_precision="validation"),
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Makes the rows of a task.

    Attributes:
        task: Its setting.
        seeds: Of every row.
        last: The name of the last layer, before which dropout is put.
        views: Names of the views; none where inputs have no such symmetry.
        scaled: What calibration fits: a temperature, or the scale of the variance of numbers.
        board: The measure, whose way is replaced.
    """

    task: Task
    seeds: tuple[int, ...] = (0,)
    last: str = "linear"
    views: tuple[str, ...] = MIRROR
    scaled: str = "temperature"
    board: Board = dataclasses.field(default_factory=Board)

    def plain(self, name: str, **way: Any) -> Config:
        """Return a row of the plain network, or of what is chosen for it."""
        return self._row(name, MAP(), Way(**way), self.task)

    def bars(self) -> list[Config]:
        """Return the plain network, with a temperature, and with its mirror image, averaged both ways."""
        rows = [self.plain("plain", calibrate=False), self.plain(f"plain + {self.scaled}")]
        for words, pooling in (("probabilities", "probs"), ("log-probabilities", "log-probs")):
            if self.views:
                way = {"views": self.views, "pooling": pooling, "temperatures": "one"}
                rows.append(self.plain(f"plain + mirror, {words}", **way))
        return rows

    def not_fitted(self, methods: Mapping[str, bayesify.Method], *, brief: bool = False) -> list[Config]:
        """Return each method as it is and widened, without and with views; in brief only the last of these."""
        rows = []
        for name, method in methods.items():
            for widened in (True,) if brief else (False, True):
                for views in (self.views,) if brief else dict.fromkeys(((), self.views)):
                    include = (self.last,) if isinstance(method, MCDropout) else None
                    rows.append(self._drawn(name, method, self.task, include, widened=widened, views=views))
        return rows

    def surveyed(
        self, methods: Mapping[str, bayesify.Method], task: Task, include: tuple[str, ...] | None = None
    ) -> list[Config]:
        """Return methods that need a pass over training data, whose task may show `fit` the validation data."""
        return [
            self._drawn(name, method, task, include, views=views)
            for name, method in methods.items()
            for views in dict.fromkeys(((), self.views))
        ]

    def chosen(self) -> list[Config]:
        """Return what the library chooses by itself within two and within four passes."""
        return [self.plain(f"chosen, {passes} passes", passes=passes) for passes in (2, 4)]

    def _drawn(
        self,
        name: str,
        method: bayesify.Method,
        task: Task,
        include: tuple[str, ...] | None,
        *,
        views: tuple[str, ...],
        widened: bool = False,
    ) -> Config:
        """Return a row that draws: with one temperature for the average, or with views, pooled as is best."""
        pooled: dict[str, Any] = {} if views else {"pooling": "probs", "temperatures": "one"}
        way = Way(widened=widened, views=views, num_draws=DRAWS, **pooled)
        return self._row(name + ", widened" * widened + " + mirror" * bool(views), method, way, task, include)

    def _row(
        self, name: str, method: bayesify.Method, way: Way, task: Task, include: tuple[str, ...] | None = None
    ) -> Config:
        board = dataclasses.replace(self.board, way=way)
        return Config(name, task, method, (board,), seeds=self.seeds, include=include)


IMAGES: dict[str, bayesify.Method] = {
    "BayesAdapter, not fitted": ADAPTER,
    "iBNN, not fitted": FACTORS,
    "ABNN, not fitted": NORMS,
    "dropout before the last layer": MCDropout(p=0.1, insert_before="linear"),
}
# The last layer of 150 intents is too large for a covariance, so its Kronecker factors are taken; that of scenes is a
# convolution, which has no other.
HEAD = {"Laplace, last layer": Laplace(structure="kronecker", mc_labels=1, prior_precision="validation")}
PIXELS = {**IMAGES, "dropout before the last layer": MCDropout(p=0.1, insert_before="conv")}
WITHOUT_NORMS = {name: method for name, method in IMAGES.items() if method != NORMS}


def _images(rows: Rows, methods: Mapping[str, bayesify.Method], *, brief: bool = False) -> list[Config]:
    choosing = dataclasses.replace(rows.task, choose=True)  # type: ignore[type-var]
    layers = dict(list(LAYERS.items())[:1]) if brief else LAYERS
    return [*rows.bars(), *rows.chosen(), *rows.not_fitted(methods, brief=brief), *rows.surveyed(layers, choosing)]


def _uci(table: str) -> list[Config]:
    rows = Rows(UciBoard(table), seeds=FIVE, last="2", views=(), scaled="scale of the variance")
    by_evidence = {
        name: dataclasses.replace(method, prior_precision="marginal-likelihood", mc_labels=None)
        for name, method in LAYERS.items()
    }
    return [
        *rows.bars(),
        *rows.not_fitted(WITHOUT_NORMS),
        *rows.surveyed(by_evidence, rows.task),
        *rows.chosen(),
    ]


QUERIES = Rows(Clinc(), last="head", views=(), board=Board(near=("out of scope",)))
# A pixel is an example of the figures, a scene one of the intervals: two hundred draws of four hundred thousand pixels.
SCENES = Rows(ScenesBoard(), last="head", board=Board(near=(), resamples=200))

EXPERIMENTS = {
    "scoreboard_fashion": _images(Rows(FashionBoard(), seeds=THREE, last="fc2"), WITHOUT_NORMS),
    "scoreboard_cifar_resnet20": _images(Rows(CifarBoard()), IMAGES),
    "scoreboard_cifar_resnet44": _images(Rows(CifarBoard("resnet44")), IMAGES, brief=True),
    "scoreboard_clinc": [
        *QUERIES.bars(),
        *QUERIES.not_fitted(IMAGES),
        *QUERIES.surveyed(HEAD, Shown(QUERIES.task), ("head",)),
        *QUERIES.chosen(),
    ],
    **{f"scoreboard_uci_{table}": _uci(table) for table in TABLES},
    "scoreboard_scenes": [
        *SCENES.bars(),
        *SCENES.not_fitted(PIXELS),
        *SCENES.surveyed(HEAD, Shown(SCENES.task), ("head",)),
        *SCENES.chosen(),
    ],
}
