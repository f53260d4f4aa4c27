"""A black-box suite for the endpoint picker protocol. It tests a running picker by its address, or it starts
our own picker for the run.

    our own picker      python -m pytest tests/conformance
    a running picker    python -m pytest tests/conformance --picker 127.0.0.1:9002
                            --picker-endpoints 127.0.0.1:8000,127.0.0.1:8001

`rows` lists the requirements. `tools.conformance.dataplane` is the data plane's side of the protocol. It was
written from the protocol and knows nothing of any picker. The names of tests contain their row, and the run
ends with a table of rows.
"""
