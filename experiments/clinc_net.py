"""A network for CLINC150 that somebody trained, for the transcript of docs/deciding.md: MiniLM with a linear head.

`BAYESIFY_DATA=... BAYESIFY_ENCODER=... python experiments/clinc_net.py` fits the head on 20 queries of each of the 150
intents (the encoder stays as it is), and writes, into the present folder, `clinc.safetensors`; `clinc.jsonl`, these
queries (part train) and 10 others of each intent (part test), from CLINC150's own validation part; `outside-val.jsonl`,
the 100 queries outside all intents that are for validation; and `queries.jsonl`, 500 test queries with an intent and
500 without, by turns.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Intents", "make"]

CLASSES, TRAIN, VAL = 150, 20, 10


class Intents(nn.Module):
    """An encoder, the mean over its tokens, normalised, and a linear head."""

    def __init__(self, encoder: Any, classes: int = CLASSES) -> None:
        """Put a head on an encoder."""
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, classes)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map tokens (B, T) to unit vectors (B, D)."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return nn.functional.normalize((states * mask).sum(1) / mask.sum(1).clamp_min(1), dim=-1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, C)."""
        logits: Tensor = self.head(self.pooled(input_ids, attention_mask))
        return logits


def make() -> Intents:
    """Return the network with the published encoder and a random head."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(os.environ["BAYESIFY_ENCODER"], local_files_only=True)
    encoder.pooler = None  # its output is not used
    return Intents(encoder)


def _each(pairs: Sequence[Sequence[str]], number: int, part: str) -> list[dict[str, str]]:
    """Return the first queries of each intent."""
    seen: dict[str, int] = {}
    found = []
    for text, intent in pairs:
        seen[intent] = seen.get(intent, 0) + 1
        if seen[intent] <= number:
            found.append({"text": text, "intent": intent, "part": part})
    return found


def _write(path: str, rows: Sequence[dict[str, str]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the files, and fit the head."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    with gzip.open(Path(os.environ["BAYESIFY_DATA"]) / "text" / "clinc150_data_full.json.gz") as file:
        data = json.load(file)
    train = _each(data["train"], TRAIN, "train")
    _write("clinc.jsonl", [*train, *_each(data["val"], VAL, "test")])
    _write("outside-val.jsonl", [{"text": text} for text, _ in data["oos_val"]])
    inside = [{"text": text, "intent": intent} for text, intent in data["test"]][::9]
    outside = [{"text": text, "intent": "oos"} for text, _ in data["oos_test"]][::2]
    _write("queries.jsonl", [row for pair in zip(inside, outside, strict=True) for row in pair])

    network, tokenizer = make().eval(), AutoTokenizer.from_pretrained(os.environ["BAYESIFY_ENCODER"])
    train.sort(key=lambda row: len(row["text"]))
    vectors = []
    with torch.no_grad():
        for start in range(0, len(train), 100):
            tokens = tokenizer([row["text"] for row in train[start : start + 100]], padding=True, return_tensors="pt")
            vectors.append(network.pooled(tokens["input_ids"], tokens["attention_mask"]))
    x, names = torch.cat(vectors), sorted({row["intent"] for row in train})
    y = torch.tensor([names.index(row["intent"]) for row in train])
    weight, bias = torch.zeros(CLASSES, x.shape[1], requires_grad=True), torch.zeros(CLASSES, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = nn.functional.cross_entropy(x @ weight.T + bias, y) + 1e-4 * weight.square().sum() / 2
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimizer.step(loss)  # type: ignore[no-untyped-call, arg-type]
    network.head.weight.data.copy_(weight)
    network.head.bias.data.copy_(bias)
    save_file(network.state_dict(), "clinc.safetensors")


if __name__ == "__main__":
    main()
