"""One compressor per file. A new one is a file here and an import in `compress/__init__.py`: see CONTRIBUTING.md."""
