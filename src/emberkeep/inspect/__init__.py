"""What can be said of a repository without a cluster: summary, difference, export."""
