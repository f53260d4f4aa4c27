"""The picker behind each gateway of docs/protocol.md: the tests send, read and fail as that gateway does."""
