"""The tests mirror `server/` and `runner/`. What several of them share is in `models.py` and `conftest.py`."""
