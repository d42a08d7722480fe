"""The kvkeep command: parses, calls, prints."""
