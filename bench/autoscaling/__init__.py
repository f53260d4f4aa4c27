"""How many model servers: an autoscaler on the picker's own signal,
in the simulated fleet (docs/autoscaling.md)."""
