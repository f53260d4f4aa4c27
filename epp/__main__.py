"""`python -m epp` is the `epp` command."""

import sys

from epp.cli import main

sys.exit(main())
