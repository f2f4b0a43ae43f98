#!/usr/bin/env python
"""A training run from a recipe, alone or under `accelerate launch`; the same as `recnmt train`."""

import sys

from recnmt_hf.commands.main import main


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
