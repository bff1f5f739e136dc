"""The reference trainer: data, model, training loop and checkpoints, on FSDP2 with zeropp. `zeropp train`
runs it."""
