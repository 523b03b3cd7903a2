"""Plain PyTorch programs that Paceline is measured against."""
