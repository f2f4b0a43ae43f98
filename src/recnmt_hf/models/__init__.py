"""The models, one flat folder: what travels to the Hub with a checkpoint."""
