"""Compressors of papers that lose to the others here. They are imported when they are named, for comparisons."""
