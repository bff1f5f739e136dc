"""zeropp in the frameworks that people train with: one module each, which needs its framework installed. Thin
layers over the public API; docs/frameworks.md has the smallest script for each."""
