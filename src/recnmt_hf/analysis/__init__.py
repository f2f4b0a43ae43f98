"""What trained models do inside: evidence of single sentences, and plots of it."""
