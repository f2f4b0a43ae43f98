"""What trains and compares: sweeps, logical inference, probing tasks, and predicting words from states."""
