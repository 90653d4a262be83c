"""The grid layout: rows rearranged so that any version is restored fast."""
