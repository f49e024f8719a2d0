"""From logits to tokens: noise, penalties, grammars and log-probabilities of a batch."""
