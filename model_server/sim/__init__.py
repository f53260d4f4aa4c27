"""Many simulated engines on one virtual clock, driven by any router."""
