"""What a Bayesian LoRA of a large model takes of memory: `python -m benchmarks.memory`, each case in a process.

The model is a GPT-2 of random weights, with LoRA of rank 8 at the attention's `c_attn`. A figure is the peak of the
resident memory (`ru_maxrss`) after the model was built, minus what the imports take, in multiples of the model's own
bytes. `--computed` prints what follows for a model of a billion parameters.

`--classes 10 10000` measures predictors instead: the most bytes that results of operations held at once, beside the
posterior's own tensors, in multiples of the logits' (eight images of 3 x 8 x 8, a convolution and a linear layer, in
one chunk). A predictor is flat in classes where its multiple does not grow.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["computed", "measured", "run"]

RESULTS = Path(__file__).parent / "results"
ACTIONS = ("build", "plain step", "convert", "step", "predict", "save and load")
SHAPES = {"small": (2, 64, 500), "medium": (12, 768, 50257), "large": (48, 1600, 50257)}  # layers, width, vocabulary
BATCH, TOKENS = 1, 32


def peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run(action: str, share: bool, shape: str) -> dict[str, Any]:
    """Do one thing to a model and return the bytes that it took."""
    import peft
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import bayesify

    layers, width, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    began = peak()
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=width // 64, n_positions=64, **ends)
    base = GPT2LMHeadModel(config)
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    network = peft.get_peft_model(base, adapter)
    own = sum(p.numel() * p.element_size() for p in base.parameters())
    learned = sum(p.numel() for p in network.parameters() if p.requires_grad)
    ids = torch.randint(vocabulary, (BATCH, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    method = bayesify.BayesAdapter(epochs=1)
    if action == "plain step":
        optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
        network(**batch).loss.backward()
        optimizer.step()
    elif action != "build":
        posterior = bayesify.convert(network, method, share=share)
        if action == "step":
            optimizer = torch.optim.SGD([p for p in posterior.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
            bayesify.Objective(posterior, num_data=100)(batch).backward()
            optimizer.step()
        elif action == "predict":
            bayesify.predict(posterior, {"input_ids": ids}, num_draws=4)
        elif action == "save and load":
            with tempfile.TemporaryDirectory() as folder:
                bayesify.save(posterior, folder)
                bayesify.load(folder, network)
    return {"bytes": peak() - began, "model": own, "parameters": own // 4, "learned": learned}


def measured(shape: str = "medium", *, nice: int = 0) -> dict[str, dict[str, Any]]:
    """Return what each action takes, with the frozen base shared, and two of them with it copied."""
    found = {}
    for action in ACTIONS:
        for share in (True, False) if action in ("convert", "step") else (True,):
            command = ["nice", "-n", str(nice), sys.executable, "-m", "benchmarks.memory", "--action", action]
            command += ["--shape", shape] + ([] if share else ["--copy"])
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[action + ("" if share else ", copied")] = json.loads(said.splitlines()[-1])
    return found


def computed(parameters: float = 1.24e9, learned: int = 851_968, bytes_each: int = 4) -> dict[str, float]:
    """Return gigabytes of a model with an adapter, beside activations, which are those of the plain model.

    Means and log standard deviations are copies; training adds their gradients and momenta.

    Args:
        parameters: Of the base.
        learned: Of the adapter; the default is rank 8 at the queries and values of 16 layers of width 2048, with
            values of width 512.
        bytes_each: Of a number of the base.

    >>> {name: round(value, 3) for name, value in computed().items()}
    {'model': 4.96, 'plain LoRA, training': 4.97, 'posterior': 4.97, 'training': 4.984, 'posterior, base copied': 9.93}
    """
    base, each = parameters * bytes_each, 4 * learned
    return {
        "model": base / 1e9,
        "plain LoRA, training": (base + 3 * each) / 1e9,
        "posterior": (base + 3 * each) / 1e9,
        "training": (base + 7 * each) / 1e9,
        "posterior, base copied": (2 * base + 3 * each) / 1e9,
    }


def by_classes(classes: int) -> dict[str, float]:
    """Return the peak of each predictor in multiples of the bytes of the logits."""
    import torch
    from torch import nn

    import bayesify
    from bayesify import Linearised, Streamlined
    from tests.prediction.test_memory import Peak

    torch.manual_seed(0)
    images, directions = torch.randn(8, 3, 8, 8), 20

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
        )

    adapter, views = bayesify.BayesAdapter(), bayesify.Views("identity", "mirror")
    members = bayesify.DeepEnsemble(members=3, start="perturbed")
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "20 draws": (adapter, {"num_draws": directions}),
        "100 draws": (adapter, {"num_draws": 5 * directions}),
        "20 draws, two views": (adapter, {"num_draws": directions, "views": views}),
        "three members": (members, {}),
        "three members, streamlined": (members, {"how": "streamlined"}),
        "moments": (adapter, {"how": Streamlined(engine="moments")}),
        "principal": (adapter, {"how": Streamlined(engine="principal")}),
        "principal, two directions": (adapter, {"how": Streamlined(engine="principal", directions=2)}),
        "principal, two views": (adapter, {"how": Streamlined(engine="principal"), "views": views}),
        "margin": (adapter, {"how": Streamlined(engine="margin")}),
        "linearised": (adapter, {"how": Linearised()}),
        "linearised, sketched": (adapter, {"how": Linearised(sketch=1)}),
        "covariance": (adapter, {"how": Streamlined(covariance="full")}),
    }
    found = {}
    for name, (method, options) in cases.items():
        made = (
            nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, classes)) if name == "covariance" else network()
        )
        posterior = bayesify.convert(made, method)
        try:
            with Peak(posterior, images) as peak:
                bayesify.predict(posterior, images, chunk_size=len(images), seed=0, **options)
        except ValueError as error:  # which says what to use instead
            print(f"{name}: {error}")
            continue
        found[name] = round(peak.most / (len(images) * classes * 4), 1)
    return found


def main() -> None:
    """Measure, or do one action."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--action", choices=ACTIONS, help="do one thing in this process and print its bytes")
    parser.add_argument("--copy", action="store_true", help="with the base copied")
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--computed", action="store_true")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--classes", type=int, nargs="*", help="measure predictors at so many classes")
    arguments = parser.parse_args()
    if arguments.classes:
        from benchmarks.timing import keep

        tables = {f"{classes:,} classes": by_classes(classes) for classes in arguments.classes}
        names = list(dict.fromkeys(name for table in tables.values() for name in table))
        peaks = {name: {title: table.get(name) for title, table in tables.items()} for name in names}
        keep("memory", {"peak of a prediction, in multiples of its logits": peaks}, classes=arguments.classes)
        return
    if arguments.computed:
        for bytes_each, words in ((4, "float32"), (2, "bfloat16")):
            print(words, {name: round(value, 2) for name, value in computed(bytes_each=bytes_each).items()})
        return
    if arguments.action is not None:
        print(json.dumps(run(arguments.action, not arguments.copy, arguments.shape)))
        return
    from experiments.records import Records

    records = Records(RESULTS / "memory.json")
    began = time.perf_counter()
    for name, found in measured(arguments.shape, nice=arguments.nice).items():
        row = {**found, "models": round(found["bytes"] / found["model"], 3)}
        records.append(name, row, config={"shape": arguments.shape}, seconds=time.perf_counter() - began)
        print(f"{name:24} {row['models']:.2f} models, {row['bytes'] / 1e6:,.0f} MB", flush=True)


if __name__ == "__main__":
    main()
