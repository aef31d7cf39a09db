"""The figures of the pages that users read: each is computed from raw points, with all that a reader needs to judge it.

`python docs/benchmarks/write_claims.py` puts them into the pages; tests/test_claims.py compares.
"""
