#!/usr/bin/env python
"""Train from a recipe, as `recnmt train` does; for `accelerate launch`."""

import sys

from recnmt_hf.commands.main import main


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
