"""What leaves when, on all ranks alike."""
