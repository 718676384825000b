"""`python -m tiny_engram` is the command `tiny-engram`."""

import sys

from tiny_engram.cli import main

if __name__ == "__main__":
    sys.exit(main())
