"""Prediction to first order in what is random."""

from bayesify.predict.linearised._engine import LinearisedPass, Plan, make_plan

__all__ = ["LinearisedPass", "Plan", "make_plan"]
