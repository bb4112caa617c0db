"""Run the command line: `python -m bayesify`."""

import sys

from bayesify.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
