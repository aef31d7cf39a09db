"""Communication hooks for other people's training loops. Import each hook from its file."""
