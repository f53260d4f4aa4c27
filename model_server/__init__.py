"""A small model server whose prefix cache, scheduler and metrics behave like vLLM's."""
