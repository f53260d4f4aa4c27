"""The picker behind each gateway of docs/protocol.md. The tests send, read and fail as that gateway does."""
