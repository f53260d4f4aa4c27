"""The same requests by the same rules, live and simulated:
real processes and the real clock against the virtual one."""
