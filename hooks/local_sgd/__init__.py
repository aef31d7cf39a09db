"""Averaging once in many steps: each site trains alone, then differences are averaged (SlowMo, DiLoCo)."""
