"""Matrix products with plain and quantized weights in Triton."""
