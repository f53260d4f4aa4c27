"""Where torch is missing, these tests are not collected. `make test-engine` runs them, and `make test`
calls it.
"""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") is not None else ["test_*.py"]
