"""What trained models do inside, what their states hold, comparisons of runs, and plots."""
