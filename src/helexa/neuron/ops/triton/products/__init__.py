"""Matrix products on plain and quantized weights."""
