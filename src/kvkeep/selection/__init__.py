"""Pure functions: scores, counts and protection in, a KeepDecision out."""
