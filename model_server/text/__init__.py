"""The tokenizer and chat template of a real model, and stand-ins for both and for the words of answers."""
