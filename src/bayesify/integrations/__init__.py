"""Other packages' loops, estimators, models and hubs: one thin module for each, behind an extra of its name."""

__all__: list[str] = []
