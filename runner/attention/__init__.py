"""Paged attention: one protocol (`backend.AttentionBackend`), an SDPA reference and a Triton backend."""
