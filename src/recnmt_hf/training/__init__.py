"""Recipes, the trainer, checkpoints."""
