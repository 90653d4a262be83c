"""Results as plots, and plots as one HTML page that needs nothing beside it."""
