"""How much a service takes on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bound what one request can ask for, and what may wait.

    Attributes:
        timeout: Seconds in which a request is answered; one that would take longer is refused at once.
        max_batch: How many rows are decided together.
        max_rows: How many rows a request may have.
        max_bytes: How large the body of a request may be.
        max_pixels: How many pixels an image may have, before it is resized.

    >>> Limits(timeout=0.5).max_batch
    64
    """

    timeout: float = 2.0
    max_batch: int = 64
    max_rows: int = 256
    max_bytes: int = 8 * 2**20
    max_pixels: int = 25_000_000

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("timeout", "max_batch", "max_rows", "max_bytes", "max_pixels"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be above 0.")
