"""The Studio in a browser: `python app.py`, the same as `tiny-engram app`; `--help` tells its options."""

import sys

from tiny_engram.cli import main

if __name__ == "__main__":
    sys.exit(main(["app", *sys.argv[1:]]))
