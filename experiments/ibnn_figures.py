"""iBNN's figures: where components lie and what each does, uncertainty against noise, and starts of other widths.

`BAYESIFY_DATA=... python -m experiments.ibnn_figures` takes the fits of `python -m experiments.run
ibnn_cifar_main_resnet20 ibnn_fashion_sizes` from their checkpoints in `--work`. Its parts:

- `start`: accuracy before the first step for starts of other widths, on the first 1,000 validation images;
- `noise`: total, aleatoric and epistemic uncertainty against levels of noise (the paper's Figure 8);
- `components`: each component's accuracy on the validation images, and where it lies;
- `lenet`: the same of the smallest LeNet on test images (the paper's Figure 2).

Rows go to `experiments/results/ibnn_*.json`, pictures beside them. `--trial` takes a few images and keeps nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import bayesify
from bayesify import IBNN
from bayesify.data import gaussian_noise, salt_and_pepper
from experiments.components import look_at_components, plot_components
from experiments.config import Config, Setting
from experiments.data import load
from experiments.networks import cifar_inputs
from experiments.records import PICTURES, RESULTS, Records
from experiments.run import fitted, found

EXPERIMENT = "ibnn_cifar_main_resnet20"
STARTS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 0.75)
LEVELS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
# As in the paper (eq. 28), of normalised inputs.
NOISES = {
    "gaussian mixture": partial(gaussian_noise, how="mix"),
    "salt-and-pepper elements": partial(salt_and_pepper, per="element"),
}


def start_row(setting: Setting, method: IBNN) -> dict[str, float]:
    """Return the accuracy before the first step: of the prediction, and of its draws on average."""
    posterior = bayesify.convert(setting.network, method)
    images, labels = next(iter(DataLoader(setting.val.dataset, 1000)))
    prediction = bayesify.predict(posterior, images, seed=0, keep_samples=True)
    assert isinstance(prediction, bayesify.ClassificationPrediction)
    assert prediction.samples is not None
    found = {
        "accuracy": (prediction.label == labels).double().mean(),
        "accuracy of draws": (prediction.samples.argmax(-1) == labels).double().mean(),
        "nll": -prediction.log_probs.gather(-1, labels[:, None]).mean(),
    }
    return {name: round(float(value), 5) for name, value in found.items()}


def noise_row(posterior: bayesify.Posterior, name: str, kind: str, number: int) -> dict[str, Any]:
    """Return the mean uncertainties for each level of noise."""
    images = load("cifar10", "test").inputs[:number]
    found: dict[str, list[float]] = {"total": [], "aleatoric": [], "epistemic": []}
    for level in LEVELS:
        prediction = bayesify.predict(posterior, NOISES[kind](cifar_inputs(images), level, generator=0), seed=0)
        for key, values in found.items():
            values.append(round(float(getattr(prediction, key).mean()), 5))
    return {"name": name, "noise": kind, "images": len(images), "levels": LEVELS, **found}


def components_row(posterior: bayesify.Posterior, loader: DataLoader[Any], picture: Path) -> dict[str, Any]:
    """Look at the components of a fit, and draw them."""
    found = look_at_components(posterior, loader)  # type: ignore[arg-type]
    print(plot_components(found, picture))
    return {"accuracy": [round(float(a), 5) for a in found.accuracy], "disagreement": found.mean_disagreement}


def draw_noise(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw Figure 8: aleatoric below, epistemic above, for each method and kind of noise."""
    from matplotlib.figure import Figure

    names, kinds = list(dict.fromkeys(r["name"] for r in rows)), list(dict.fromkeys(r["noise"] for r in rows))
    figure = Figure(figsize=(3.4 * len(names), 2.8 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), len(names), squeeze=False, sharey=True)
    for row in rows:
        axis = axes[kinds.index(row["noise"])][names.index(row["name"])]
        parts = row["aleatoric"], row["epistemic"]
        axis.stackplot(row["levels"], *parts, labels=("aleatoric", "epistemic"), colors=("#56B4E9", "#E69F00"))
        axis.set(title=row["name"], xlabel=f"{row['noise']} noise", ylabel="nats")
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Make the rows of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("start", "noise", "components", "lenet")
    parser.add_argument("--part", choices=parts, nargs="*", default=list(parts))
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for checkpoints")
    parser.add_argument("--trial", action="store_true", help="a few images, and nothing is kept")
    arguments = parser.parse_args()
    trial = arguments.trial

    def posterior_of(config: Config) -> tuple[bayesify.Posterior, Setting]:
        return fitted(config, trial=trial, work=arguments.work)

    def records_of(name: str, **settings: Any) -> Records:
        return Records(None if trial else RESULTS / f"{name}.json", settings)

    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) if trial else PICTURES
        if "start" in arguments.part:
            records = records_of("ibnn_cifar_start_resnet20")
            setting = posterior_of(found(EXPERIMENT, "map"))[1]
            for std in STARTS:
                method = IBNN(components=8, draws_per_component=1, means_std=std)
                records.row(f"means_std={std}", partial(start_row, setting, method), config={"method": method})
        if "noise" in arguments.part:
            records = records_of("ibnn_cifar_noise_resnet20", levels=LEVELS, images=500)
            made = []
            for kind, name in product(NOISES, ("mc-dropout", "ibnn-8")):
                config = found(EXPERIMENT, name)

                def make(config: Config = config, name: str = name, kind: str = kind) -> dict[str, Any]:
                    return noise_row(posterior_of(config)[0], name, kind, 16 if trial else 500)

                made.append(records.row(f"{name}, {kind}", make, config=config.described()))
            draw_noise(made, pictures / "ibnn_cifar_noise_resnet20.svg")
        if "components" in arguments.part:
            records = records_of("ibnn_cifar_components_resnet20")
            for name in ("ibnn-4", "ibnn-8", "ibnn-16"):
                config = found(EXPERIMENT, name)

                def look(config: Config = config, name: str = name) -> dict[str, Any]:
                    posterior, setting = posterior_of(config)
                    return components_row(posterior, setting.val, pictures / f"ibnn_cifar_components_{name}.svg")

                records.row(name, look, config=config.described())
        if "lenet" in arguments.part:
            config = found("ibnn_fashion_sizes", "iBNN, 1x parameters")

            def look_at_lenet() -> dict[str, Any]:
                posterior, setting = posterior_of(config)
                return components_row(posterior, setting.test, pictures / "ibnn_fashion_components.svg")

            records_of("ibnn_fashion_components").row("iBNN, 1x", look_at_lenet, config=config.described())


if __name__ == "__main__":
    main()
