"""LoRA adapters made Bayesian, against the plain LoRA, a temperature, MC dropout and Laplace of the head.

Settings are those that were written down first, for all three tasks; `lora_tuning` compares some of them on validation
data. Five draws each. A prior that the evidence chose is also followed by `widen`, on validation data: of so few
sentences the evidence knows little.
"""

from __future__ import annotations

import dataclasses

import bayesify
from bayesify import IBNN, MAP, SGLD, SWAG, BayesAdapter, Laplace, MCDropout
from experiments.config import Config
from experiments.lora import LoraLanguage, LoraText
from experiments.measures import Scored, Widened

__all__ = ["EXPERIMENTS"]

THREE = (0, 1, 2)
FIVE = Scored(num_draws=5)
EVERYWHERE, HEAD, ADAPTER, B = ("*",), ("*.head",), ("*.lora_A", "*.lora_B"), ("*.lora_B",)
CURVATURE = Laplace(structure="kronecker", mc_labels=1, prior_precision="marginal-likelihood")
ADAPTED = BayesAdapter(epochs=2, optimizer="adam", lr=2e-4, start_std=(0.02, 0.03), log_std_lr=0.02)
START = BayesAdapter(epochs=0, start_std=(0.02, 0.03))
AVERAGED = SWAG(epochs=3, lr=0.05, snapshots_per_epoch=7, rank=20)
SAMPLED = SGLD(epochs=3, lr=0.02, samples_per_chain=5)
FACTORS = IBNN(epochs=2, components=2, draws_per_component=3, repeats=1, means_std=0.25, start_std=(0.2, 0.08))

Task = LoraText | LoraLanguage


def _rows(task: Task, *, head: bool = True) -> list[Config]:
    rows = [
        Config("plain", task, MAP(), (Scored(),)),
        Config("mc-dropout", task, MCDropout(), (FIVE,), include=EVERYWHERE),
        *([Config("laplace, head", task, CURVATURE, (FIVE,), include=HEAD)] if head else []),
        *([Config("laplace, head, widened", task, CURVATURE, (Widened(num_draws=5),), include=HEAD)] if head else []),
        Config("laplace", task, CURVATURE, (FIVE,), include=ADAPTER),
        Config("laplace, widened", task, CURVATURE, (Widened(num_draws=5),), include=ADAPTER),
        Config("bayes-adapter", task, ADAPTED, (FIVE,), include=ADAPTER),
        Config("bayes-adapter, B", task, ADAPTED, (FIVE,), include=B),
        Config("widened", task, START, (Widened(num_draws=5),), include=ADAPTER),
        Config("swag", task, AVERAGED, (FIVE,), include=ADAPTER),
        Config("sgld", task, SAMPLED, (FIVE,), include=ADAPTER),
        Config("ibnn", task, FACTORS, (FIVE,), include=ADAPTER),
    ]
    return [dataclasses.replace(row, seeds=THREE) for row in rows]


def _tuning(task: Task) -> list[Config]:
    """Return settings that are compared on validation sentences of one seed."""
    tried: dict[str, bayesify.Method] = {
        **{
            f"bayes-adapter, start_std={std:g}": dataclasses.replace(ADAPTED, start_std=(std, 1.5 * std))
            for std in (0.005, 0.02, 0.08)
        },
        **{f"swag, lr={lr:g}": dataclasses.replace(AVERAGED, lr=lr) for lr in (0.01, 0.05, 0.2)},
        **{f"sgld, lr={lr:g}": dataclasses.replace(SAMPLED, lr=lr) for lr in (0.005, 0.02, 0.08)},
        **{
            f"ibnn, means_std={std:g}": dataclasses.replace(FACTORS, means_std=std, start_std=(0.8 * std, 0.3 * std))
            for std in (0.05, 0.25, 0.75)
        },
    }
    return [
        Config(name, task, method, (Scored(num_draws=5, test=False),), include=ADAPTER)
        for name, method in tried.items()
    ]


CLINC = LoraText()
SST2 = LoraText("sst2", train=100, epochs=5)

EXPERIMENTS = {
    "lora_tuning": _tuning(CLINC),
    "lora_clinc": _rows(CLINC),
    "lora_sst2": _rows(SST2),
    "lora_gpt2": _rows(LoraLanguage(), head=False),
}
