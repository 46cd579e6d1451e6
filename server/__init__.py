"""What a client sees: HTTP, wire formats, text in and out. Imports `runner.messages` and nothing else of `runner`."""
