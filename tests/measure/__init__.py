"""Tests of bayesify.measure."""
