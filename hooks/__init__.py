"""Where it plugs in: communication hooks for other people's training loops. Import each from its file."""
