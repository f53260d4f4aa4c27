"""The endpoint picker protocol: our picker passes the product's own checks (`epp.tools.conformance`) as every
gateway and on both transports. Here is also what these checks cannot ask of a picker: to drain, and to speak
TLS.
"""
