"""Texts of a file, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bayesify.data.encoding import Encoding
from bayesify.data.labels import Labels, is_missing
from bayesify.data.records import Records, Remark

__all__ = ["TextEncoding"]


@dataclass(frozen=True)
class TextEncoding(Encoding):
    """Turn texts into tokens, padded to the longest of a batch.

    Attributes:
        column: The column with the texts.
        tokenizer: Of transformers: called with texts it gives `input_ids`, and it has a `pad_token_id`.
        max_tokens: Where a text is cut.
        labels: How the label column is read.
    """

    kind: ClassVar[str] = "text"

    column: str
    tokenizer: Any = field(compare=False)
    max_tokens: int = 256
    labels: Labels | None = None

    def features(self, records: Records) -> tuple[list[Any], dict[int, str], list[Remark]]:
        """Return the tokens of each text."""
        if self.column not in records.columns and records.rows:
            there = ", ".join(map(repr, records.columns))
            raise ValueError(f"There is no column {self.column!r} with texts; there are {there}.")
        texts = records.columns.get(self.column, [])
        wrong = {
            i: f"the column {self.column!r} holds no text" + ("" if is_missing(text) else f" but {str(text)[:40]!r}")
            for i, text in enumerate(texts)
            if not isinstance(text, str) or not text.strip()
        }
        told = ["." if i in wrong else text for i, text in enumerate(texts)]
        found = self.tokenizer(told, truncation=True, max_length=self.max_tokens)["input_ids"] if told else []
        return list(found), wrong, []

    def inputs(self, features: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, (B, T)."""
        length = max(1, *map(len, features))
        ids = torch.full((len(features), length), self.tokenizer.pad_token_id)
        mask = torch.zeros(len(features), length, dtype=torch.int64)
        for i, tokens in enumerate(features):
            ids[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            mask[i, : len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def dataset(self, features: list[list[list[int]]], targets: Tensor) -> Dataset[tuple[list[int], Tensor]]:
        """Return a data set of (tokens, target), whose `collate` makes batches."""
        return _Texts(self, list(chain.from_iterable(features)), targets)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; the tokeniser is kept beside them."""
        labels = None if self.labels is None else self.labels.to_dict()
        return {"kind": self.kind, "column": self.column, "max_tokens": self.max_tokens, "labels": labels}

    @classmethod
    def from_dict(cls, values: dict[str, Any], tokenizer: Any) -> TextEncoding:
        """Return what `to_dict` described."""
        labels = None if values["labels"] is None else Labels.from_dict(values["labels"])
        return cls(str(values["column"]), tokenizer, int(values["max_tokens"]), labels)


class _Texts(Dataset[tuple[list[int], Tensor]]):
    """Tokens with their targets."""

    def __init__(self, encoding: TextEncoding, tokens: list[list[int]], targets: Tensor) -> None:
        self.encoding, self.tokens, self.targets = encoding, tokens, targets
        labels = encoding.labels
        self.classes = None if labels is None else labels.classes

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[list[int], Tensor]:
        return self.tokens[index], self.targets[index]

    def collate(self, examples: Sequence[tuple[list[int], Tensor]]) -> dict[str, Tensor]:
        """Put examples into a batch as transformers' models take it."""
        inputs = self.encoding.inputs([tokens for tokens, _ in examples])
        return {**inputs, "labels": torch.stack([target for _, target in examples])}
