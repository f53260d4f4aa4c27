"""The endpoint picker protocol as a black-box suite:
any picker by its address, or our own, started for the run.

Our own picker:      python -m pytest tests/conformance One that is running: python -m pytest
tests/conformance --picker 127.0.0.1:9002 --picker-endpoints 127.0.0.1:8000,127.0.0.1:8001

`rows` lists the requirements. `dataplane` is a data plane's half of the wire: it was written from the
protocol and knows nothing of any picker. Tests are named by their row; the run ends with a table of rows.
"""
