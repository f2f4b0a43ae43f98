"""Experiments that train and compare: sweeps, logical inference, probing tasks, predicting words from states."""
