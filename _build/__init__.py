"""What setup.py builds with. Not installed."""
