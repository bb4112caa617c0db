"""Experiments on real data: what makes the tables and figures of the documentation."""
