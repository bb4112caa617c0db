"""From parsed arguments to the objects that commands work with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from bayesify import storage
from bayesify.cli._common import JobError, UsageError
from bayesify.cli._comparison import Made, Task, fit_method
from bayesify.cli._data import load_split, make_loader, ood_sets
from bayesify.cli._network import load_network
from bayesify.cli._settings import make_method
from bayesify.methods import Method

__all__ = ["make_task", "network_of", "one_posterior", "split_of"]


def network_of(args: argparse.Namespace) -> nn.Module:
    """Load the network that the arguments name; random weights are the same each time, so that checkpoints fit."""
    torch.manual_seed(args.seed)
    return load_network(args.model, args.model_arg, args.weights, args.device)


def split_of(args: argparse.Namespace, split: str) -> Dataset[Any]:
    """Load a split that must be there."""
    found = load_split(args.data, split, normalise=args.normalise)
    if found is None:
        raise JobError(f"{args.data} has no {split!r} split. Give --data as a package.module:function that makes one.")
    return found


def make_task(args: argparse.Namespace, network: nn.Module, methods: Sequence[Method]) -> Task:
    """Load the data that the arguments name, and training data if one of the methods learns."""
    learns, chooses = any(method.learns for method in methods), any(method.surveys for method in methods)

    def loader(split: str, *, shuffle: bool = False) -> DataLoader[Any]:
        return make_loader(split_of(args, split), args.batch_size, shuffle=shuffle)

    test = split_of(args, args.split)
    ood = ood_sets(getattr(args, "ood", []), test, normalise=args.normalise)
    checkpoint = getattr(args, "checkpoint", None)
    return Task(
        network=network,
        test=make_loader(test, args.batch_size),
        train=loader("train", shuffle=True) if learns else None,
        val=loader("val") if getattr(args, "calibrate", False) else None,
        chosen_on=_chosen_on(args) if chooses else None,
        ood={name: make_loader(data, args.batch_size) for name, data in ood.items()},
        likelihood=getattr(args, "likelihood", "classification"),
        epochs=getattr(args, "epochs", None),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        predicting={"num_draws": args.num_draws, "how": args.how},
        score=getattr(args, "score", "total"),
        seed=args.seed,
        progress=not args.quiet,
    )


def _chosen_on(args: argparse.Namespace) -> DataLoader[Any] | None:
    """Return the validation data, where there are any: a method may choose settings on them."""
    found = load_split(args.data, "val", normalise=args.normalise)
    return None if found is None else make_loader(found, args.batch_size)


def one_posterior(args: argparse.Namespace) -> tuple[Task, Made]:
    """Load a saved posterior, or make one from a method."""
    if (args.posterior is None) == (args.method is None):
        raise UsageError("give either --posterior DIR, or --method NAME to make one now")
    network = network_of(args)
    if args.posterior is not None:
        return make_task(args, network, []), Made(storage.load(args.posterior, network), None)
    method = make_method(args.method, args.set)
    task = make_task(args, network, [method if args.epochs is None else replace(method, epochs=args.epochs)])
    return task, fit_method(task, method)
