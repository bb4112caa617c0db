"""What the site is made with; `make docs` builds it, and fails on a broken link or reference."""

import pytest

pytest.importorskip("griffe")

from tools.doctests import fenced


def test_doctests_are_fenced_up_to_the_next_blank_line():
    fence = "```"
    text = "Add.\n\nExample:\n    >>> 1 + 1\n    2\n\nMore, a >>> b.\n\n>>> 3"
    example = f"Example:\n    {fence}pycon\n    >>> 1 + 1\n    2\n    {fence}"
    assert fenced(text) == f"Add.\n\n{example}\n\nMore, a >>> b.\n\n{fence}pycon\n>>> 3\n{fence}"


def test_what_has_no_doctest_stays():
    assert fenced("Nothing to see.\n\n    x >>> 3\n") == "Nothing to see.\n\n    x >>> 3\n"
