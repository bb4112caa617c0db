"""`bayesify demo`: the whole path on embedded data."""

from __future__ import annotations

import argparse
from pathlib import Path

from bayesify.cli._common import Commands, Output, add_command

__all__ = ["add", "run"]

EPILOG = """\
examples:
  bayesify demo                        table here, report in bayesify-demo/report.html
  bayesify demo --out results --seed 1
  bayesify demo --json --quiet > demo.json"""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "demo",
        run,
        help="train a small network on embedded digits, make it Bayesian with every method, and compare",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--out", default="bayesify-demo", metavar="DIR", help="folder of the report (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="train for a moment only: a check that everything runs")


def run(args: argparse.Namespace) -> Output:
    """Run the demo."""
    from bayesify.demo import run_demo

    result = run_demo(Path(args.out), seed=args.seed, quick=args.quick, progress=not args.quiet)
    lines = [result.introduction, "", str(result.comparison), ""]
    lines.append(f"The report is in {result.report}." if result.report else "There is no report.")
    return Output("\n".join(lines), result.to_dict(), failed=bool(result.comparison.failures))
