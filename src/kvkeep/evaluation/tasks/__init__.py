"""Tasks: one small file each, with its data, prompt, grader and version."""
