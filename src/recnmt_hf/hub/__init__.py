"""Models in other formats, and on the Hub."""
