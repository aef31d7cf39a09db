"""Trainings: models, data, the training itself, and an emulated accelerator that takes its time."""
