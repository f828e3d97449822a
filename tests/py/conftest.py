"""Run: `tools/build py` (again after changing C), then `PYTHONPATH=build/test-py/python python3 -m pytest tests/py/test_import.py`."""
