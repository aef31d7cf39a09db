"""What a training tells of itself while it runs."""
