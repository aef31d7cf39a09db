"""What compressors remember, by parameter name: residuals, checkpoints, taking a step back."""
