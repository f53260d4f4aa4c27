"""What turns a step's plan into tokens."""
