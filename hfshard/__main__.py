"""`python -m hfshard`: the command line."""

import sys

from hfshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
