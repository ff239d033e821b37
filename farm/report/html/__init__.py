"""Pages: one HTML file that needs nothing else, or served."""
