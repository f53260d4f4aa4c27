"""The picker behind each gateway of docs/protocol.md, as that gateway sends, reads and fails."""
