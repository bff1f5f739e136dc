"""The block formats on NVIDIA and AMD GPUs, compiled by Triton."""
