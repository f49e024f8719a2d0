"""Parts shared by the prefill and the decode server."""
