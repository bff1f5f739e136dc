"""Adapters to FSDP2 and torch.optim: the only code that uses their private parts."""
