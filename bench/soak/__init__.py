"""The whole gateway under a mixed load for minutes or hours:
nothing fails, nothing grows, and nothing stays booked at the end."""
