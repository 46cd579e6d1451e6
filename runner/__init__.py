"""What the device does: rows in, tokens out. One process per device; see docs/architecture.md."""
