"""What is done to whole repositories: collect, fork, verify."""
