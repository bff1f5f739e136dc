"""All that touches the private parts of FSDP2 and of torch.optim."""
