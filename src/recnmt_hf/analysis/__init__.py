"""What trained models do inside: what they do to single sentences, and plots of it."""
