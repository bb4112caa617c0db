"""LoRA adapters (peft) of all-MiniLM-L6-v2 on SST-2 and CLINC150, and of a small GPT-2 on SST-2's sentences.

Of the encoder, the layers below the adapted ones are frozen and have no randomness: they run once, and what they return
is the input of the network here, which is a peft model of the layers above, the mean over tokens and a linear head (in
`modules_to_save`). The GPT-2 is trained here on CLINC150's queries, and adapted to sentences of SST-2.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bayesify
from experiments.config import Setting
from experiments.data import load
from experiments.records import config_hash

__all__ = ["LoraLanguage", "LoraText", "Top"]

Row = tuple[Tensor, int]
LONGEST = 24  # tokens


class Top(nn.Module):
    """The last layers of an encoder, the mean over their tokens, and a linear head."""

    def __init__(self, layers: Sequence[nn.Module], width: int, classes: int) -> None:
        """Put a head on layers."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Map states (B, T, D) of the layer below to logits (B, C)."""
        mask = attention_mask[..., None].to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask[:, None, None, :].bool())
        logits: Tensor = self.head(self.dropout((hidden * mask).sum(1) / mask.sum(1)))
        return logits


@dataclass(frozen=True)
class LoraText:
    """A LoRA of the last layers and a head, trained on few sentences.

    Attributes:
        data: "clinc150", with queries out of scope as OOD inputs; or "sst2", with the queries of CLINC150 as such.
        train: Training sentences of each class.
        val: Validation sentences, to choose settings and temperatures by.
        test: Sentences that are reported, and at most so many OOD ones.
        layers: How many of the last layers have an adapter.
        rank: Of the adapter; its factor is 2.
        epochs: Of the plain LoRA.
        encoder: Whose folder the environment variable BAYESIFY_ENCODER names.
    """

    data: str = "clinc150"
    train: int = 2
    val: int = 100
    test: int = 200
    layers: int = 1
    rank: int = 8
    epochs: int = 10
    encoder: str = "all-MiniLM-L6-v2"

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Train the LoRA of this seed, or go on with it; a trial takes a small random encoder."""
        from peft import LoraConfig, get_peft_model

        folder = "tiny" if trial else os.environ.get("BAYESIFY_ENCODER")
        if folder is None:
            raise FileNotFoundError(f"Set BAYESIFY_ENCODER to the folder of {self.encoder}, to load it from there.")
        layers, width, rows = self._states(folder, few=trial)
        torch.manual_seed(seed)
        base = Top(copy.deepcopy(layers), width, 2 if self.data == "sst2" else 150)
        config = LoraConfig(
            r=self.rank, lora_alpha=2 * self.rank, lora_dropout=0.1, target_modules=["query", "value", "output.dense"],
            modules_to_save=["head"],
        )  # fmt: skip
        network = get_peft_model(base, config)
        train = _loader(rows["train"], 32, shuffle=True, collate_fn=_collate)
        adam = bayesify.MAP(optimizer="adam", lr=2e-3, schedule="cosine", epochs=1 if trial else self.epochs)
        plain = bayesify.convert(network, adam)
        named = config_hash([self.data, self.train, self.layers, self.rank, self.epochs, self.encoder])
        kept = None if trial else work / f"lora-{named}-{seed}"
        bayesify.fit(plain, train, seed=seed, checkpoint=kept, progress=False, accuracy_tolerance=1.0)
        val, test, ood = (_loader(rows[part], 100, collate_fn=_collate) for part in ("val", "test", "ood"))
        name = "CLINC150" if self.data == "sst2" else "out of scope"
        return Setting(plain.network.eval(), train, val, test, {name: ood})

    def _states(self, folder: str, *, few: bool) -> tuple[list[nn.Module], int, dict[str, list[Row]]]:
        numbers = (1, 8, 8) if few else (self.train, self.val, self.test)
        return _states(folder, self.data, self.layers, *numbers)


@lru_cache(maxsize=2)
def _states(
    folder: str, data: str, last: int, train: int, val: int, test: int
) -> tuple[list[nn.Module], int, dict[str, list[Row]]]:
    """Return the last layers, their width, and the states below them of the sentences, with labels."""
    from experiments.clinc import make_encoder

    torch.manual_seed(0)
    made, width, tokenise = make_encoder(folder)
    encoder: Any = made.eval()
    layers = list(encoder.encoder.layer)
    encoder.encoder.layer = nn.ModuleList(layers[:-last])

    def states(pairs: Sequence[tuple[str, int]]) -> list[Row]:
        found: list[Row] = []
        for start in range(0, len(pairs), 64):
            some = pairs[start : start + 64]
            tokens = {name: t[:, :LONGEST] for name, t in tokenise(tuple(text for text, _ in some)).items()}
            with torch.no_grad():
                hidden = encoder(**tokens).last_hidden_state
            for row, mask, (_, label) in zip(hidden, tokens["attention_mask"], some, strict=True):
                found.append((row[mask.bool()].clone(), label))
        return found

    other = "test" if data == "sst2" else "oos-test"
    rows = {
        "train": states(_each(_pairs(data, "train"), train)),
        "val": states(_spread(_pairs(data, "val"), val)),
        "test": states(_spread(_pairs(data, "test"), test)),
        "ood": states(_spread(_pairs("clinc150", other), test)),
    }
    return layers[-last:], width, rows


def _pairs(data: Any, part: Any) -> list[tuple[str, int]]:
    split: Any = load(data, part)
    return list(split)


def _loader(rows: Any, size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows, size, **options)


def _each(pairs: list[tuple[str, int]], number: int) -> list[tuple[str, int]]:
    """Return the first sentences of each class.

    >>> _each([("a", 0), ("b", 0), ("c", 1)], 1)
    [('a', 0), ('c', 1)]
    """
    seen: dict[int, int] = {}
    chosen = []
    for text, label in pairs:
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= number:
            chosen.append((text, label))
    return chosen


def _spread(pairs: list[tuple[str, int]], number: int) -> list[tuple[str, int]]:
    """Return so many sentences, evenly from all of them.

    >>> _spread([("a", 0), ("b", 0), ("c", 1), ("d", 1)], 2)
    [('a', 0), ('c', 1)]
    """
    return pairs[:: max(1, len(pairs) // number)][:number]


def _collate(rows: list[Row]) -> dict[str, Tensor]:
    hidden = nn.utils.rnn.pad_sequence([row for row, _ in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row, _ in rows])
    mask = (torch.arange(hidden.shape[1]) < lengths[:, None]).long()
    return {"hidden": hidden, "attention_mask": mask, "labels": torch.tensor([label for _, label in rows])}


@dataclass(frozen=True)
class LoraLanguage:
    """A small GPT-2 of CLINC150's queries with a LoRA of SST-2's sentences; the next token is what is predicted.

    Tokens are byte pairs of the queries. OOD are the test sentences with their words in another order, token by token.

    Attributes:
        queries: On which the base is trained.
        sentences: On which the LoRA is trained.
        test: Sentences that are reported; half as many are for validation.
        epochs: Of the base, and of the LoRA.
    """

    queries: int = 2000
    sentences: int = 200
    test: int = 60
    epochs: int = 3

    def setting(self, seed: int, *, trial: bool, work: Path) -> Setting:
        """Train the base and the LoRA of this seed, or go on with them."""
        from peft import LoraConfig, TaskType, get_peft_model

        queries, sentences, test = (64, 32, 8) if trial else (self.queries, self.sentences, self.test)
        epochs = 1 if trial else self.epochs
        texts = [text for text, _ in _spread(_pairs("clinc150", "train"), queries)]
        encode = _byte_pairs(texts)
        base = _language_model(_loader([encode(text) for text in texts], 32, shuffle=True), epochs, work, trial)
        parts: dict[str, list[str]] = {
            part: [text for text, _ in _spread(_pairs("sst2", part), number)]
            for part, number in (("train", sentences), ("val", test // 2), ("test", test))
        }
        torch.manual_seed(seed)
        config = LoraConfig(
            task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, lora_dropout=0.1, fan_in_fan_out=True,
            target_modules=["c_attn", "c_proj", "c_fc"],
        )  # fmt: skip
        network = get_peft_model(base, config)
        loaders = {name: _loader([encode(text) for text in found], 50) for name, found in parts.items()}
        train = _loader(loaders["train"].dataset, 32, shuffle=True)
        adam = bayesify.MAP(optimizer="adam", lr=3e-3, schedule="cosine", epochs=epochs)
        plain = bayesify.convert(network, adam)
        kept = None if trial else work / f"lora-language-{config_hash([self.queries, self.sentences, epochs])}-{seed}"
        bayesify.fit(plain, train, seed=seed, checkpoint=kept, progress=False, accuracy_tolerance=1.0)
        mixed = _loader([encode(_in_another_order(text)) for text in parts["test"]], 50)
        ood = {"words in another order": mixed}
        return Setting(plain.network.eval(), train, loaders["val"], loaders["test"], ood)


def _byte_pairs(texts: list[str]) -> Any:
    """Return a function from a text to tokens and labels of one length; padding is no label."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(lowercase=True)
    tokenizer.train_from_iterator(texts, vocab_size=384, special_tokens=["<pad>", "<end>"], show_progress=False)

    def encode(text: str) -> dict[str, Tensor]:
        ids = [1, *tokenizer.encode(text).ids, 1][:LONGEST]
        padded = torch.tensor(ids + [0] * (LONGEST - len(ids)))
        mask = torch.arange(LONGEST) < len(ids)
        return {"input_ids": padded, "attention_mask": mask.long(), "labels": padded.where(mask, -100)}

    return encode


def _language_model(loader: DataLoader[Any], epochs: int, work: Path, trial: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=384, n_positions=LONGEST, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1,
        pad_token_id=0, use_cache=False,
    )  # fmt: skip
    adam = bayesify.MAP(optimizer="adam", lr=3e-3, schedule="cosine", epochs=epochs)
    plain = bayesify.convert(GPT2LMHeadModel(config), adam)  # type: ignore[no-untyped-call]
    kept = None if trial else work / f"lora-base-{config_hash([len(loader.dataset), epochs])}"  # type: ignore[arg-type]
    bayesify.fit(plain, loader, checkpoint=kept, progress=False, accuracy_tolerance=1.0)
    return plain.network.eval()


def _in_another_order(text: str) -> str:
    words = text.split()
    random.Random(text).shuffle(words)
    return " ".join(words)
