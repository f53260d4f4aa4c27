"""Whether a picker keeps the endpoint picker protocol as each gateway speaks it:
`python -m epp.conformance --help`.

A tool of its own beside the picker.
It knows a picker by its address alone, whoever wrote it, and nothing of the picker imports it.
"""
