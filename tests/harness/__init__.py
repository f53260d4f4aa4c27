"""Shared by integration tests, fault tests, conformance tests and benches: real processes, scriptable
servers, plain clients.

Everything is an async context manager that ends what it started. Servers that a test scripts (`backend`,
`fake_picker`) run inside the test's event loop. Envoy and the picker are processes of their own.
"""
