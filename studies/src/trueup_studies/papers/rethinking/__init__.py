"""Rethinking Calibration: calibrated is not calibratable."""
