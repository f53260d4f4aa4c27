"""The endpoint picker: an Envoy ext-proc service that routes LLM requests by prefix, adapter and load."""
