"""The reducer: gradients get ready during backward, and backward ends with their averages."""
