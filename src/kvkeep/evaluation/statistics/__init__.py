"""Numbers with their uncertainty: problems are the sample, draws only make each problem sharper."""
