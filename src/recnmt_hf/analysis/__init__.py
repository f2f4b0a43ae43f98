"""Inspecting trained models: attention, gates, recurrences and global states, learning curves, and plots."""
