"""Live networks: their logits over a loader, calibrated networks, dropout passes, corruptions, small networks."""
