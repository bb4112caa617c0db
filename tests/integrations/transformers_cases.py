"""Tiny models of transformers, rows for them, and a tokenizer of a few words."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ("[PAD]", "[UNK]", "good", "bad", "film", "a", "the", "very", "not", "plot", "end", ".")


def tokenizer():
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token=".", model_max_length=12
    )


def bert(head="ForSequenceClassification", **options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes, **options)
    torch.manual_seed(0)
    return getattr(transformers, f"Bert{head}")(config)


def gpt2(head="LMHeadModel", **options):
    special = {"bos_token_id": 11, "eos_token_id": 11, "pad_token_id": 0}
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=len(WORDS), **sizes, **special, **options)
    torch.manual_seed(0)
    return getattr(transformers, f"GPT2{head}")(config)


def rows(number=12, length=5, **columns):
    """Return rows of tokens, with columns that are functions of them."""
    made = torch.randint(2, 11, (number, length), generator=torch.Generator().manual_seed(0))
    mask = [1] * length
    return [
        {"input_ids": ids, "attention_mask": mask, **{name: column(ids) for name, column in columns.items()}}
        for ids in made.tolist()
    ]


def arguments(folder, **options):
    quiet = {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "use_cpu": True,
    }
    steps = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 12}
    return transformers.TrainingArguments(str(folder), **{**quiet, **steps, **options})
