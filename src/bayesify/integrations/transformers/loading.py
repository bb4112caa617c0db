"""Loaders of what users of transformers have: texts, tokenised rows, data sets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator

from bayesify._core.trees import SPAN_KEYS, TARGET_KEYS
from bayesify.laws import Posterior, require_posterior

__all__ = ["columns_of", "loader", "model_of"]


def loader(
    posterior: Posterior,
    data: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    labels: Sequence[Any] | None = None,
    batch_size: int = 32,
    shuffle: bool = False,
) -> DataLoader[Any]:
    """Return batches of texts, tokenised rows or a data set: for `predict`, `evaluate`, `calibrate`, `fit` and others.

    Columns that the network's `forward` does not take are left out, but for targets. Rows are padded by the tokenizer,
    to the longest of each batch, and so are labels of tokens, with -100.

    Args:
        posterior: Whose network will see them.
        data: Texts, or pairs of texts; a `datasets.Dataset`; a list of dictionaries; or a `BatchEncoding` of many rows.
        tokenizer: Makes tokens of texts, cut to its greatest length, and pads rows. Rows of one length do without.
        labels: One for each row, if the data have none.
        batch_size: Rows in each batch.
        shuffle: Whether they come in a new order each time.

    Returns:
        The loader.

    Example:
        >>> from bayesify import MAP, convert
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        >>> posterior = convert(BertForSequenceClassification(BertConfig(vocab_size=9, **sizes)), MAP())
        >>> rows = [{"input_ids": [1, 2], "label": 0, "topic": "film"}, {"input_ids": [3, 4], "label": 1}]
        >>> [sorted(batch) for batch in loader(posterior, rows)]
        [['input_ids', 'labels']]
    """
    require_posterior(posterior)
    rows = _rows(data, tokenizer)
    if labels is not None:
        if len(labels) != len(rows):
            raise ValueError(f"There are {len(labels)} labels for {len(rows)} rows: give one for each.")
        rows = _Labelled(rows, labels)
    if not len(rows):
        raise ValueError("There is nothing to load: the data are empty.")
    collate = _Collate(columns_of(posterior.network), tokenizer)
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)


def model_of(network: nn.Module) -> nn.Module:
    """Return the model inside of a peft model; any other network is itself."""
    inner = getattr(network, "get_base_model", None)
    return network if inner is None else inner()


def columns_of(network: nn.Module) -> tuple[str, ...]:
    """Return what the network's `forward` takes, by name."""
    return tuple(inspect.signature(model_of(network).forward).parameters)


def _rows(data: Any, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """Return a sequence of dictionaries."""
    if isinstance(data, str):
        data = [data]
    if isinstance(data, list | tuple) and data and (isinstance(data[0], str) or _is_pair(data[0])):
        if tokenizer is None:
            raise ValueError("Texts need a tokenizer, the network's own: loader(posterior, texts, tokenizer).")
        pairs = _is_pair(data[0])
        first, second = ([one for one, _ in data], [two for _, two in data]) if pairs else (list(data), None)
        data = tokenizer(first, second, truncation=True)
    if isinstance(data, BatchEncoding | Mapping):
        lengths = {name: len(column) for name, column in data.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The columns have different numbers of rows: {lengths}.")
        return [{name: data[name][row] for name in data} for row in range(next(iter(lengths.values()), 0))]
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return data
    raise TypeError(
        f"A loader takes texts, a datasets.Dataset, a list of dictionaries or a BatchEncoding, not a "
        f"{type(data).__name__}."
    )


def _is_pair(row: Any) -> bool:
    return isinstance(row, list | tuple) and len(row) == 2 and all(isinstance(text, str) for text in row)


class _Labelled:
    def __init__(self, rows: Any, labels: Sequence[Any]) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "labels": self.labels[index]}


class _Collate:
    """Make a batch of rows: choose columns, pad labels of tokens, let the tokenizer pad the rest."""

    def __init__(self, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.wanted = {*columns, *TARGET_KEYS, *SPAN_KEYS}
        self.taken = set(columns) - {*TARGET_KEYS, *SPAN_KEYS}
        self.tokenizer = tokenizer

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        for row in rows:
            if not isinstance(row, Mapping):
                raise TypeError(f"A row is a dictionary by column, but it is a {type(row).__name__}.")
            if self.taken.isdisjoint(row):
                raise ValueError(
                    f"The data have the columns {sorted(row)}, and the network takes none of them. Make tokens of the "
                    "texts first: data.map(lambda row: tokenizer(row['text'], truncation=True))."
                )
        chosen = [{name: value for name, value in row.items() if name in self.wanted} for row in rows]
        if self.tokenizer is None:
            lengths = {len(row["input_ids"]) for row in chosen if "input_ids" in row}
            if len(lengths) > 1:
                raise ValueError(
                    f"The rows have {min(lengths)} to {max(lengths)} tokens, and padding needs a tokenizer: "
                    "loader(posterior, data, tokenizer)."
                )
            return dict(default_data_collator(chosen))
        return dict(DataCollatorWithPadding(self.tokenizer)(self._padded(chosen)))

    def _padded(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows whose labels of tokens have one length, where there are such; the tokenizer pads the others."""
        assert self.tokenizer is not None
        for name in ("labels", "shift_labels", "label"):
            if not all(name in row and hasattr(row[name], "__len__") and "input_ids" in row for row in rows):
                continue
            lengths = [(len(row[name]), len(row["input_ids"])) for row in rows]
            if any(one != other for one, other in lengths):
                return rows  # labels of another kind; where they should be of tokens, the loss says so
            longest = max(length for length, _ in lengths)
            for row in rows:
                own = [int(value) for value in row[name]]
                gap = [-100] * (longest - len(own))
                row[name] = gap + own if self.tokenizer.padding_side == "left" else own + gap
        return rows
