"""Which target belongs to which output: language models are trained on the token after the one they read.

The conventions are those of transformers, which is not imported: they are read off the network's classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["Convention", "beside_outputs", "convention_of"]

Convention = Literal["as given", "next token", "decoder", "unknown"]

# Losses of transformers that compare the output of a position with the label of the next one, and that do not.
_NEXT = ("ForCausalLM", "ForConditionalGeneration")
_SAME = ("ForMaskedLM", "Classification", "ForMultipleChoice", "ForNextSentence", "ForQuestionAnswering")
_LANGUAGE_MODEL = ("CausalLM", "LMHead", "ForConditionalGeneration", "DoubleHeads")


def convention_of(network: nn.Module) -> Convention:
    """Return how the labels of a network's batches stand to its outputs.

    The outermost model of transformers inside the network decides, by the loss that its own `forward` calls:
    "next token" for causal language models, whose labels are the tokens themselves; "decoder" for encoder-decoders,
    which shift their decoder's inputs instead; "unknown" for language models whose loss is not one of transformers'
    shared ones; "as given" for all else.

    >>> convention_of(nn.Linear(2, 3))
    'as given'
    """
    model = next((module for module in network.modules() if _from_transformers(module)), None)
    forward = None if model is None else inspect.unwrap(type(model).forward)
    code = getattr(forward, "__code__", None)
    if model is None or code is None or "labels" not in inspect.signature(forward).parameters:  # type: ignore[arg-type]
        return "as given"
    name = type(model).__name__
    if "loss_function" in code.co_names:
        given = getattr(model, "_loss_function", None)
        loss = getattr(model, "loss_type", None) or "ForCausalLM" if given is None else getattr(given, "__name__", "")
        if any(word in loss for word in _NEXT):
            return "next token"
        known = given is None or any(word in loss for word in _SAME)
        return _decoder(model, forward) if known else "unknown"
    if {"shift_logits", "shift_labels"} & set(code.co_varnames):  # transformers before its losses were shared
        return "next token"
    if any(word in name for word in _LANGUAGE_MODEL) and _decoder(model, forward) == "as given":
        return "unknown"
    return _decoder(model, forward)


def _from_transformers(module: nn.Module) -> bool:
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(module).__mro__
    )


def _decoder(model: nn.Module, forward: Any) -> Convention:
    reads = "decoder_input_ids" in inspect.signature(forward).parameters
    classifies = any(word in type(model).__name__ for word in _SAME)
    return "decoder" if reads and not classifies else "as given"


def beside_outputs(convention: Convention, batch: Any, inputs: Any, targets: Any, ignore_index: int) -> Any:
    """Return the targets so that each stands beside the output that predicts it, and those without one are ignored.

    Only whole numbers (B, T) can be tokens; all other targets are returned as they are.

    >>> ids = torch.tensor([[5, 6, 7]])
    >>> beside_outputs("next token", {"input_ids": ids, "labels": ids}, {"input_ids": ids}, ids, -100)
    tensor([[   6,    7, -100]])
    """
    tokens = isinstance(targets, Tensor) and targets.ndim == 2 and not targets.is_floating_point()
    named = isinstance(batch, Mapping)
    if convention == "as given" or not tokens or (named and "shift_labels" in batch and "labels" not in batch):
        return targets
    if named and "start_positions" in batch and "labels" not in batch:
        return targets
    if convention == "decoder":
        if not isinstance(inputs, Mapping) or "decoder_input_ids" not in inputs:
            raise ValueError(
                "The network is an encoder-decoder, which makes its decoder's inputs from the labels, and labels are "
                "no inputs of a posterior. Put them into the batch: "
                "batch['decoder_input_ids'] = network.prepare_decoder_input_ids_from_labels(batch['labels'])."
            )
        return targets
    if convention == "unknown" or not named or "labels" not in batch:
        own = (
            "'labels', the tokens themselves as transformers' models take them, or " if convention != "unknown" else ""
        )
        raise ValueError(
            "The network is a language model, and whether these targets are the tokens themselves or already those "
            f"that come next cannot be known. Give a mapping with {own}'shift_labels', for each position the token "
            "that comes next (or ignore_index)."
        )
    end = torch.full_like(targets[:, :1], ignore_index)
    return torch.cat([targets[:, 1:], end], dim=1)
