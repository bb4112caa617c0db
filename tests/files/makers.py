"""Small files of images and texts, and a model of transformers, for tests and for the pages of docs."""

import json

import torch

WORDS = ["a", "and", "day", "it", "the", "this", "very", "was", "weather"]
POSITIVE, NEGATIVE = ("good", "fine", "great", "nice"), ("bad", "poor", "ugly", "awful")
WORDS += [*POSITIVE, *NEGATIVE]


def make_images(folder, count):
    """Write images of two classes, dark and light."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        label = ("dark", "light")[i % 2]
        pixels = (torch.rand(20, 24, 3, generator=generator) * 90 + 130 * (i % 2)).byte().numpy()
        (folder / label).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / label / f"{i // 2}.png")
    return folder


def make_texts(path, count):
    """Write reviews as JSON lines."""
    lines = []
    for i in range(count):
        label, words = (("positive", POSITIVE), ("negative", NEGATIVE))[i % 2]
        text = f"the weather was {words[i // 2 % 4]} and {words[i // 3 % 4]}"
        lines.append(json.dumps({"text": text, "label": label}))
    path.write_text("\n".join(lines))
    return path


def make_model(folder, names=None):
    """Save a small DistilBERT with random weights and a tokeniser; without names it has no head for classes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, DistilBertModel
    from transformers import PreTrainedTokenizerFast as Fast

    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    Fast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    sizes = {"vocab_size": len(vocabulary), "dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2}
    config = DistilBertConfig(**sizes, max_position_embeddings=32, pad_token_id=0)
    if names is None:
        DistilBertModel(config).save_pretrained(folder)
    else:
        config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
        DistilBertForSequenceClassification(config).save_pretrained(folder)
    return folder
