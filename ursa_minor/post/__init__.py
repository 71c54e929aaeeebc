"""After pre-training: what a base model lacks for TRL, namely chat tokens, checked rewards, positions under padding."""
