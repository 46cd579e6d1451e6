"""The whole path on real parts: a real server process, a real runner process, a real model, other people's clients."""
