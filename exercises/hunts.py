"""The table of bug hunts."""
