"""`bayesify choose`: what a budget allows, tried on the validation part."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from bayesify import storage
from bayesify.choosing import choose
from bayesify.cli._data import make_loader
from bayesify.cli._options import Job
from bayesify.cli._output import Output

__all__ = ["Choose"]


@dataclass(frozen=True, kw_only=True)
class Choose(Job):
    r"""Try what a budget of passes allows, and save the best posterior.

    Examples:
      bayesify choose --data customers.csv --label churned --out posterior
      bayesify choose --data photos --model timm:resnet18 --weights resnet18.safetensors --passes 4 --out posterior
      bayesify choose --data my_project.data:load --model my_project.models:make_network \
          --weights network.safetensors --epochs 10 --out posterior

    Each candidate is judged by its NLL on the 'val' part, calibrated on other rows of it. The posterior that is saved
    is calibrated. 'bayesify evaluate' measures it on 'test', which is not looked at here.

    Attributes:
        out: Folder for the posterior.
        passes: How many plain passes a prediction may cost.
        epochs: How many plain epochs fitting may cost; 0 trains nothing.
        likelihood: What the outputs mean.
    """

    out: Annotated[Path, arg(metavar="DIR")]
    passes: Annotated[int, arg(metavar="N")] = 2
    epochs: Annotated[int, arg(metavar="N")] = 0
    likelihood: Literal["classification", "binary", "regression"] = "classification"

    def run(self) -> Output:
        """Choose, and save."""
        opened = self.open(likelihood=self.likelihood)
        size = self.data.batch_size
        posterior = choose(
            opened.network,
            make_loader(opened.part("val"), size),
            passes=self.passes,
            loader=make_loader(opened.part("train"), size, shuffle=True),
            epochs=self.epochs,
            likelihood=opened.likelihood,
            seed=self.prediction.seed,
            verbose=False,
        )
        if opened.files is None:
            storage.save(posterior, self.out)
        else:
            opened.files.save(self.out, posterior)
        choice = posterior.choice
        assert choice is not None
        candidates = [{**dataclasses.asdict(one), "views": str(one.views)} for one in choice.candidates]
        data = {"chosen": choice.chosen, "candidates": candidates, "posterior": str(self.out)}
        return self.finish(opened, Output(f"{choice}\n\nThe posterior is in {self.out}.", data))
