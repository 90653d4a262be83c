"""What a process runs on: threads, memory, metrics, background work."""
