"""Graph and TIR passes, one a file: canonicalization, fusion, quantization, lowering, planning."""
