"""The way of one tensor: through which files a conversion, a training step and a prediction go, and in which order.

`python -m benchmarks.way` runs README's example (an MLP with dropout, `MCDropout`) under `sys.setprofile` in four
stages: convert; fit, one epoch of one batch with a validation batch; a first prediction with 20 draws; a first
prediction with `how="streamlined"`. With `PYTHONPATH=TREE/src` it measures the package of that tree. Only files of the
package count; all its modules are imported before, so that imports do not.

- files: the different files of the Python functions of the package that run.
- raw: changes of folder between consecutive frames of the package, calls and returns, loops as often as they run. A
  call of a function of the package leads to its file; a return, or a generator's yield, leads back to the file of the
  nearest caller in the package, whatever lies between them (torch's module calls, contextlib).
- cut: changes of folder along the functions of the package in the order of their first calls: what somebody reads who
  follows the program and reads each function once. Loops are so cut after one round, and returns show only where
  the caller goes on to a function that was not read before.

The folder of a file is its directory; a module beside the folders is a folder of its own.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import sys
import warnings
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import bayesify

__all__ = ["changes", "folder", "follow"]

ROOT = str(Path(bayesify.__file__).parent) + "/"


def follow(function: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Return the files that a function goes through: frame by frame, and by first calls."""
    frames: list[str] = []
    first: dict[CodeType, str] = {}

    def profile(frame: FrameType | None, event: str, argument: Any) -> None:
        del argument
        if frame is None or event not in ("call", "return") or not frame.f_code.co_filename.startswith(ROOT):
            return
        if event == "call":
            first.setdefault(frame.f_code, frame.f_code.co_filename.removeprefix(ROOT))
        else:
            frame = frame.f_back
            while frame is not None and not frame.f_code.co_filename.startswith(ROOT):
                frame = frame.f_back
        if frame is not None:
            frames.append(frame.f_code.co_filename.removeprefix(ROOT))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return frames, list(first.values())


def folder(name: str) -> str:
    """Return the folder of a file, or the file itself if it is in none.

    >>> folder("laws/_bank.py"), folder("storage.py")
    ('laws', 'storage.py')
    """
    return name.rpartition("/")[0] or name


def changes(way: list[str]) -> int:
    """Count changes of folder.

    >>> changes(["laws/_bank.py", "laws/_law.py", "storage.py", "laws/_bank.py"])
    2
    """
    return sum(folder(a) != folder(b) for a, b in pairwise(way))


def stages() -> dict[str, Callable[[], Any]]:
    """Return README's example, stage by stage; each prediction is a posterior's first."""
    torch.manual_seed(0)
    x, y = torch.rand(64, 8, 8), torch.arange(64) % 10
    layers = nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    network = nn.Sequential(*layers)
    draws = "num_draws" if "num_draws" in inspect.signature(bayesify.predict).parameters else "num_samples"

    def convert() -> Any:
        return bayesify.convert(network, bayesify.MCDropout())

    data = torch.utils.data.TensorDataset(x, y)
    loader, val_loader = (torch.utils.data.DataLoader(data, batch_size=64) for _ in range(2))
    ready = [convert() for _ in range(3)]
    return {
        "convert": convert,
        "fit, one step": lambda: bayesify.fit(ready[0], loader, epochs=1, val_loader=val_loader, progress=False),
        "predict, sampling": lambda: bayesify.predict(ready[1], x, seed=0, **{draws: 20}),
        "predict, streamlined": lambda: bayesify.predict(ready[2], x, how="streamlined", seed=0),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the files by first calls")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for module in pkgutil.walk_packages([ROOT], "bayesify."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:  # an optional dependency that is not here
                continue
    table, files = {}, set()
    for name, function in stages().items():
        frames, first = follow(function)
        files.update(frames)
        table[name] = {"files": len(set(frames)), "raw": changes(frames), "cut": changes(first)}
        if arguments.show:
            print(f"\n{name}: " + " -> ".join(file.removesuffix(".py") for file, _ in groupby(first)) + "\n")
    totals = {title: sum(row[title] for row in table.values()) for title in ("raw", "cut")}
    table["all four"] = {"files": len(files), **totals}
    print(f"{ROOT}\n{'':24}" + "".join(f"{title:>8}" for title in table["all four"]))
    for name, row in table.items():
        print(f"{name:24}" + "".join(f"{value:8d}" for value in row.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
