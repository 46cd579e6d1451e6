"""Tests of the load generator, against scripted servers and a real one."""
