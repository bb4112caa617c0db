"""Tests of bayesify.decide."""
