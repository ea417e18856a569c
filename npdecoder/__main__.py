"""python -m npdecoder: the same as the npdecoder command."""

import sys

from npdecoder.cli import main

if __name__ == "__main__":
    sys.exit(main())
