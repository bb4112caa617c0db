"""Noise on layer inputs: a mixture of Gaussians that the inputs of layers are multiplied by."""

from bayesify.posteriors._inputs._latents import register_layer
from bayesify.posteriors._inputs._posterior import InputMixturePosterior

__all__ = ["InputMixturePosterior", "register_layer"]
