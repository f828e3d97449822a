"""Run: `tools/build py` (again after changing C), then `PYTHONPATH=build/test-py/python python3 -m pytest tests/py/test_import.py`.

All of them as `make test` does: `tools/run-tests --variant py --variant py-asan`; with another Python: SIDESTREAM_TEST_PYTHON=PROGRAM.
"""
