"""The memory of compressors by parameter name: residuals, checkpoints, undoing a step."""
