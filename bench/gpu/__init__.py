"""`make bench-gpu`: the rows that need an accelerator, in one command that goes on where it stopped."""
