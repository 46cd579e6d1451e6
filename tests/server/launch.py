"""Starts a server for a test: `python -m tests.server.launch CONFIG_JSON`, the fields of ServerConfig that differ."""

from __future__ import annotations

import sys

import msgspec

from server.config import ServerConfig
from server.serve import serve

if __name__ == "__main__":
    sys.exit(serve(msgspec.json.decode(sys.argv[1], type=ServerConfig)))
