"""Benchmarks: step times of the schedules side by side, and what one layer pair costs the host (`host_cost.py`)."""
