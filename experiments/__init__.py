"""Drivers: experiments that compare compressors by loss, speed and bytes, from configuration files."""
