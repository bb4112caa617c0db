"""Noise on layer inputs: a mixture of Gaussians that the inputs of layers are multiplied by."""

from bayesify.laws.input_factors.latents import register_layer
from bayesify.laws.input_factors.law import InputFactorLaw

__all__ = ["InputFactorLaw", "register_layer"]
