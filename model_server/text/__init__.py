"""Stand-ins for a tokenizer, a chat template and a language model's words."""
