"""The benchmarks of the command `directkv bench`. Nothing here is imported by the product."""
