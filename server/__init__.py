"""What a client sees: HTTP, wire formats, text in and out. Of `runner` it imports `messages` and `config` only."""
