"""How many model servers a pool needs: an autoscaler on the picker's own signal, in the simulated fleet
(docs/autoscaling.md).
"""
