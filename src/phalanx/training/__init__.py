"""Training: the engine, its optimizer state, and the call surface that DeepSpeed's users know."""
