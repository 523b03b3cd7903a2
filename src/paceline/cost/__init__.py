"""What things cost: pure functions of plain numbers, no torch."""
