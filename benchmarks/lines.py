"""How many lines of code a tree has, by folder: without docstrings, comments and blank lines.

`python -m benchmarks.lines PATH` counts a tree; `python -m benchmarks.lines PATH PATH2` prints two beside each other.
A path is a package's folder, or a checkout, of which `src/bayesify` is taken. A line counts if a token of code is on it
or goes over it; strings that are statements by themselves are docstrings. Modules beside the folders are `(root)`.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

__all__ = ["by_folder", "code_lines"]

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(source: str) -> int:
    r"""Count the lines of code of a file.

    >>> code_lines("'Say.'\n\nx = 1  # why\n# because\ny = [\n  2]\n")
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def by_folder(tree: Path) -> dict[str, tuple[int, int]]:
    """Return the number of files and of lines of code by folder; folders inside folders count with the outer one."""
    package = tree / "src" / "bayesify" if (tree / "src" / "bayesify").is_dir() else tree
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else "(root)"
        files[folder] += 1
        lines[folder] += code_lines(path.read_text(encoding="utf-8"))
    if not files:
        raise SystemExit(f"There are no Python files in {package}.")
    return {folder: (files[folder], lines[folder]) for folder in sorted(files)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path, metavar="PATH", help="a tree, or two: before and after")
    trees = parser.parse_args().trees
    if len(trees) > 2:
        parser.error("one tree or two")
    counts = [by_folder(tree) for tree in trees]
    titles = ["before", "after"] if len(trees) == 2 else ["lines"]
    heads = [f"{'files':>8}{title:>12}" for title in titles[: len(trees)]]
    print(f"{'folder':20}", *heads, "   difference" if len(trees) == 2 else "", sep="")
    total = "total"
    for count in counts:
        count[total] = tuple(map(sum, zip(*count.values(), strict=True)))  # type: ignore[assignment]
    for folder in [*sorted({name for count in counts for name in count} - {total}), total]:
        found = [count.get(folder, (0, 0)) for count in counts]
        change = f"{found[1][1] - found[0][1]:+13d}" if len(found) == 2 else ""
        print(f"{folder:20}" + "".join(f"{files:8d}{lines:12d}" for files, lines in found) + change)


if __name__ == "__main__":
    main()
