"""One compressor per file. A new file here is enough: all are imported, so `register` puts each compressor in the table."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
