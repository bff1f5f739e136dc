"""The reference trainer: from data to checkpoint, on FSDP2 with zeropp. `zeropp train` is its command."""
