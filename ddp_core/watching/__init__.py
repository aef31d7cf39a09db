"""The reports of a training while it runs."""
