#!/usr/bin/env python
"""Speed ratios of two models, measured in turns within one run; the same as `recnmt benchmark`."""

import sys

from recnmt_hf.commands.main import main


if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
