"""Several tokens of a sequence in one step: proposed, verified in one pass, drawn one by one."""
