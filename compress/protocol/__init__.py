"""The vocabulary of compressors: requests, programs, layouts, and the table of registered compressors."""
