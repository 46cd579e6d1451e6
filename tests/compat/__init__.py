"""Clients that nobody here wrote, against a running server. `make compat` runs them; see docs/compatibility.md."""
