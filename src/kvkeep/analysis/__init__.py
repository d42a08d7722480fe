"""Why policies work: how large values are, what few bits do to them, and whether one tells the other."""
