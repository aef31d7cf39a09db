"""What a step cost and when things happened in it."""
