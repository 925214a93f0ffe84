"""Units of the top controller and what the paper compares them with: behaviour and cycles, bit for bit as the policies."""
