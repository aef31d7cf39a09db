"""Tasks, which are programs on their way, and the drivers that carry them from round to round."""
