"""`python -m model_server`: the same as the command `model-server`."""

import sys

from model_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
