"""The flags of `model-server serve`, and the settings that they become. Caller: the command line."""

from model_server.serve_flags.settings import add_flags, settings

__all__ = ["add_flags", "settings"]
