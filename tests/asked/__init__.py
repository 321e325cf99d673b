"""What users asked for in public trackers, one test each; docs/asked.md has the answers."""
