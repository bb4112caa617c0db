"""Prediction to first order in what is random."""

from bayesify.prediction.linearised.linearisation import LinearisedPass, Plan, make_plan

__all__ = ["LinearisedPass", "Plan", "make_plan"]
