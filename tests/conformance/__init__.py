"""The endpoint picker protocol on both transports: each body mode, health, drains and TLS."""
