"""`python -m epp` is the `epp` command."""

import sys

from epp.serve.cli import main

sys.exit(main())
