#!/usr/bin/env python
"""A trained model becomes a repository of the Hub; the same as `recnmt publish`."""

import sys

from recnmt_hf.commands.main import main


if __name__ == "__main__":
    sys.exit(main(["publish", *sys.argv[1:]]))
