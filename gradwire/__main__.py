"""The command line: `gradwire` and `python -m gradwire`."""

import sys

from .experiments.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
