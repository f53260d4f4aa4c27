"""The flags of `model-server serve`: what may be set, said once, and turned into settings.
Caller: the command line.
"""

from model_server.serve_flags.settings import add_flags, settings

__all__ = ["add_flags", "settings"]
