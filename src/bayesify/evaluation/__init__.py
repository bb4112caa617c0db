"""How good a posterior is: measures, evaluation, comparison, checks against draws, and a report."""

__all__: list[str] = []
