"""Evidence: tasks, grading, run logs, fair comparison and the statistics behind a claim."""
