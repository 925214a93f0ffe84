"""The paper's tables and figures, done again: numbers, drawings, and a report that sets both side by side."""
