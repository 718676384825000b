"""`accelerate launch -m tiny_engram.training` is `tiny-engram train`, on as many processes as are launched."""

import sys

from tiny_engram.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
