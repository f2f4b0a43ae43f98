"""Export to other formats, model cards, and publishing on the Hub."""
