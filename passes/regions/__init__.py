"""Reading fused regions: what a kernel of schedules/ has to compute, from the body of a composite."""
