"""Runs the command line: `python -m combined_1f1b`, or under torchrun with `-m combined_1f1b`."""

from __future__ import annotations

import sys

from combined_1f1b.cli import main

if __name__ == "__main__":
    sys.exit(main())
