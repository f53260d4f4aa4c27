"""Real clients, in an environment of their own: they would bring plugins of pytest into ours."""
