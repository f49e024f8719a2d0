"""The layers that models are made of: cut over tensor parallel ranks, filled by name, called."""
